// The CUDA implementation of drop_values: checks, the current stream of the tensors' device, and the launch.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../../quantization/arguments.h"
#include "../../quantization/cuda/torch_launch.h"
#include "../arguments.h"
#include "launcher.h"

namespace megatron_zpp::cuda {

inline void drop_values(const at::Tensor& values, at::Tensor& dropped, int64_t key, int64_t first_index, int64_t threshold, double scale) {
  check_dropout_tensors(values, dropped);
  const Mask mask = mask_of(key, first_index, threshold, scale);
  const c10::cuda::CUDAGuard guard(values.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_values(values, "values", [&](auto zero) {
    using T = decltype(zero);
    const auto* source = reinterpret_cast<const typename Bits<T>::Type*>(values.const_data_ptr<T>());
    auto* target = reinterpret_cast<typename Bits<T>::Type*>(dropped.mutable_data_ptr<T>());
    check_launch(launch_drop(source, target, values.numel(), mask, stream), "drop_values");
  });
}

}  // namespace megatron_zpp::cuda
