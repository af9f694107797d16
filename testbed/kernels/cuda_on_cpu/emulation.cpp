// The CUDA kernels and their registration as they are, compiled for the CPU against the headers beside this file, as ops of CPU tensors.
#include "../../../csrc/cuda/registration.cpp"
#include "../../../csrc/dropout/cuda/drop_values.cu"
#include "../../../csrc/gaussian/cuda/decode.cu"
#include "../../../csrc/gaussian/cuda/encode.cu"
#include "../../../csrc/means/cuda/mean_values.cu"
#include "../../../csrc/ops.h"
#include "../../../csrc/quantization/cuda/decode.cu"
#include "../../../csrc/quantization/cuda/decode_mean.cu"
#include "../../../csrc/quantization/cuda/encode.cu"
#include "../../../csrc/quantization/cuda/recode_mean.cu"
#include "../../../csrc/softmax/cuda/softmax_gradient.cu"
#include "../../../csrc/softmax/cuda/softmax_parts.cu"

TORCH_LIBRARY(megatron_zpp, m) { megatron_zpp::declare_ops(m); }
TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { megatron_zpp::cuda::implement_ops(m); }

extern "C" int cuda_on_cpu_last_error() { return cudaGetLastError(); }
extern "C" void cuda_on_cpu_set_launch_hook(cuda_on_cpu::LaunchHook hook) { cuda_on_cpu::launch_hook = hook; }
