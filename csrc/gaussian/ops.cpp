// Declares the operators of Gaussian codes. Implementations are registered beside the kernels, fake kernels in megatron_zpp/ops/extension.py.
//
// values, mean, payloads: as in ../ops.cpp, with blocks of 256 values. bits: 1 to 4. rounds: of rotation, 1 or 2.
// key, keys: of the signs: one for all values that are encoded, one per slice that is decoded, or one per member of a mean.
#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(megatron_zpp, m) {
  m.def("encode_gaussian(Tensor values, Tensor(a!) payloads, int bits, int rounds, int key) -> ()");
  m.def("decode_gaussian(Tensor payloads, Tensor(a!) values, int bits, int rounds, int[] keys, bool accumulate) -> ()");
  m.def("decode_mean_gaussian(Tensor payloads, Tensor(a!) mean, int bits, int rounds, int[] keys, bool accumulate) -> ()");
}
