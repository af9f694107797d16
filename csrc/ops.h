// Declares the operators of megatron_zpp. registration.cpp registers their implementations on CPUs, cuda/registration.cpp those on GPUs,
// and megatron_zpp/ops/extension.py fake kernels.
#pragma once

#include <torch/library.h>

namespace megatron_zpp {

inline void declare_ops(torch::Library& m) {
  // Blocks.
  // values     [slices, numel]             fp32, bf16 or fp16; inner dim contiguous, any row stride; numel is a multiple of block_numel
  // mean       [slices, numel]             fp32, as values
  // payloads   [slices, bytes]           uint8; bytes at least those of codes and scales; rows start at multiples of 16 bytes
  //            [members, slices, bytes]  if the op takes a mean over members
  // recoded    [slices, bytes]           as payloads
  // noise_key  none: codes are the nearest; else rounding is stochastic, with noise from the key and the value's index in [slices, numel]
  m.def("encode_blocks(Tensor values, Tensor(a!) payloads, int bits, int block_numel, bool rotated=False, int? noise_key=None) -> ()");
  m.def("decode_blocks(Tensor payloads, Tensor(a!) values, int bits, int block_numel) -> ()");
  m.def("decode_mean_blocks(Tensor payloads, Tensor(a!) mean, int bits, int block_numel, bool accumulate, bool rotated=False) -> ()");
  m.def(
      "recode_mean_blocks(Tensor payloads, Tensor(a!) recoded, int row_numel, int bits, int next_bits, int block_numel, "
      "int? noise_key=None) -> ()");

  // Gaussian codes. values, mean and payloads as above, with blocks of 256 values. bits: 1 to 4. rounds: of rotation, 1 or 2.
  // key, keys: of the signs: one for all values that are encoded, one per slice that is decoded, or one per member of a mean.
  m.def("encode_gaussian(Tensor values, Tensor(a!) payloads, int bits, int rounds, int key) -> ()");
  m.def("decode_gaussian(Tensor payloads, Tensor(a!) values, int bits, int rounds, int[] keys, bool accumulate) -> ()");
  m.def("decode_mean_gaussian(Tensor payloads, Tensor(a!) mean, int bits, int rounds, int[] keys, bool accumulate) -> ()");

  // Takes members [members, slices, numel] and mean [slices, numel]: fp32, bf16 or fp16, inner dim contiguous, any strides. The mean is fp32,
  // or else has the dtype of the members and nothing is added to it.
  m.def("mean_values(Tensor members, Tensor(a!) mean, bool accumulate) -> ()");

  // Takes values and dropped of any shape: contiguous, of the same dtype; element i of them has the index first_index + i.
  m.def("drop_values(Tensor values, Tensor(a!) dropped, int key, int first_index, int threshold, float scale) -> ()");

  // The loss, which has kernels for GPUs only.
  // logits, gradient      [tokens, columns]  fp32, bf16 or fp16, of the same dtype; inner dim contiguous, any row stride; may be the same
  // labels                [tokens]           int64, entries of the whole vocabulary; column 0 of the logits is its entry `first`
  // largest, sums, label  [tokens]           fp32, contiguous, as is grad_loss
  m.def(
      "softmax_parts(Tensor logits, Tensor labels, int first, int entries, Tensor(a!) largest, Tensor(b!) sums, Tensor(c!) label) -> ()");
  m.def(
      "softmax_gradient(Tensor logits, Tensor labels, int first, Tensor largest, Tensor sums, Tensor grad_loss, "
      "Tensor(a!) gradient) -> ()");

  // Indices of datasets, which are built on CPUs only; data/index_builders.h has the shapes.
  m.def("build_sample_index(Tensor lengths, Tensor document_index, int seq_length, Tensor(a!) sample_index) -> ()");
  m.def("build_blend_index(Tensor weights, Tensor(a!) dataset_index, Tensor(b!) dataset_sample) -> ()");
}

}  // namespace megatron_zpp
