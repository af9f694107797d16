// The CUDA kernels and their registration as they are, compiled for the CPU against the headers beside this file, as ops of CPU tensors.
#include "../../../csrc/dropout/cuda/drop_values.cu"
#include "../../../csrc/dropout/cuda/registration.cpp"
#include "../../../csrc/gaussian/cuda/decode.cu"
#include "../../../csrc/gaussian/cuda/encode.cu"
#include "../../../csrc/gaussian/cuda/registration.cpp"
#include "../../../csrc/gaussian/ops.cpp"
#include "../../../csrc/means/cuda/mean_values.cu"
#include "../../../csrc/means/cuda/registration.cpp"
#include "../../../csrc/ops.cpp"
#include "../../../csrc/quantization/cuda/decode.cu"
#include "../../../csrc/quantization/cuda/decode_mean.cu"
#include "../../../csrc/quantization/cuda/encode.cu"
#include "../../../csrc/quantization/cuda/recode_mean.cu"
#include "../../../csrc/quantization/cuda/registration.cpp"
#include "../../../csrc/softmax/cuda/registration.cpp"
#include "../../../csrc/softmax/cuda/softmax_gradient.cu"
#include "../../../csrc/softmax/cuda/softmax_parts.cu"
#include "../../../csrc/softmax/ops.cpp"

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) {
  m.impl("drop_values", megatron_zpp::cuda::drop_values);
  m.impl("encode_gaussian", megatron_zpp::cuda::encode_gaussian);
  m.impl("decode_gaussian", megatron_zpp::cuda::decode_gaussian);
  m.impl("decode_mean_gaussian", megatron_zpp::cuda::decode_mean_gaussian);
  m.impl("mean_values", megatron_zpp::cuda::mean_values);
  m.impl("encode_blocks", megatron_zpp::cuda::encode_blocks);
  m.impl("decode_blocks", megatron_zpp::cuda::decode_blocks);
  m.impl("decode_mean_blocks", megatron_zpp::cuda::decode_mean_blocks);
  m.impl("recode_mean_blocks", megatron_zpp::cuda::recode_mean_blocks);
  m.impl("softmax_parts", megatron_zpp::cuda::softmax_parts);
  m.impl("softmax_gradient", megatron_zpp::cuda::softmax_gradient);
}
