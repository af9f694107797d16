// What a registration needs to start kernels, which do not know torch, on torch's tensors.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <cuda_runtime.h>

#include "../block_format.h"

namespace megatron_zpp::cuda {

// The type that kernels have for a type of torch.
template <class T>
struct Bits;
template <>
struct Bits<float> {
  using Type = float;
};
template <>
struct Bits<c10::BFloat16> {
  using Type = Bf16Bits;
};
template <>
struct Bits<c10::Half> {
  using Type = Fp16Bits;
};

inline void check_launch(cudaError_t error, const char* op) {
  TORCH_CHECK(error == cudaSuccess, op, " could not be launched: ", cudaGetErrorString(error));
}

}  // namespace megatron_zpp::cuda
