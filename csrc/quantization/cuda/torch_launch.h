// What a registration needs to start kernels, which do not know torch, on torch's tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <cuda_runtime.h>

#include "../rows.h"

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

template <class T>
ValueRows<const typename Bits<T>::Type> readable_bits(const at::Tensor& values) {
  return {reinterpret_cast<const typename Bits<T>::Type*>(values.const_data_ptr<T>()), values.stride(0)};
}

template <class T>
ValueRows<typename Bits<T>::Type> writable_bits(const at::Tensor& values) {
  return {reinterpret_cast<typename Bits<T>::Type*>(values.mutable_data_ptr<T>()), values.stride(0)};
}

inline void check_same_device(const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK(left.device() == right.device(), "tensors must be on one device, not on ", left.device(), " and ", right.device());
}

inline void check_launch(cudaError_t error, const char* op) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // forgets the error, of which torch would accuse the next kernel
    TORCH_CHECK(false, op, " could not be launched: ", cudaGetErrorString(error));
  }
}

}  // namespace megatron_zpp::cuda
