// Declares the operators of megatron_zpp. Implementations are registered beside the kernels, fake kernels in megatron_zpp/ops/extension.py.
//
// values     [slices, run]             fp32, bf16 or fp16; inner dim contiguous, any row stride; run is a multiple of block_numel
// mean       [slices, run]             fp32, as values
// payloads   [slices, bytes]           uint8; bytes at least those of codes and scales; rows start at multiples of 16 bytes
//            [members, slices, bytes]  if the op takes a mean over members
// recoded    [slices, bytes]           as payloads
// noise_key  none: codes are the nearest; else rounding is stochastic, with noise from the key and the value's index in [slices, run]
//
// mean_values takes members [members, slices, run] and mean [slices, run]: fp32, bf16 or fp16, inner dim contiguous, any strides. The mean is
// fp32, or else has the dtype of the members and nothing is added to it.
//
// drop_values takes values and dropped of any shape: contiguous, of the same dtype; element i of them has the index first_index + i.
#include <torch/library.h>

TORCH_LIBRARY(megatron_zpp, m) {
  m.def("encode_blocks(Tensor values, Tensor(a!) payloads, int bits, int block_numel, bool rotated=False, int? noise_key=None) -> ()");
  m.def("decode_blocks(Tensor payloads, Tensor(a!) values, int bits, int block_numel) -> ()");
  m.def("decode_mean_blocks(Tensor payloads, Tensor(a!) mean, int bits, int block_numel, bool accumulate, bool rotated=False) -> ()");
  m.def(
      "recode_mean_blocks(Tensor payloads, Tensor(a!) recoded, int run_numel, int bits, int next_bits, int block_numel, "
      "int? noise_key=None) -> ()");
  m.def("mean_values(Tensor members, Tensor(a!) mean, bool accumulate) -> ()");
  m.def("drop_values(Tensor values, Tensor(a!) dropped, int key, int first_index, int threshold, float scale) -> ()");
}
