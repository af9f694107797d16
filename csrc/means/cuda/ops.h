// The CUDA implementation of mean_values: checks, the current stream of the tensors' device, and the launch.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../../quantization/cuda/torch_launch.h"
#include "../arguments.h"
#include "launcher.h"

namespace megatron_zpp::cuda {

inline void mean_values(const at::Tensor& members, at::Tensor& mean, bool accumulate) {
  check_mean_tensors(members, mean, accumulate);
  const c10::cuda::CUDAGuard guard(mean.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_means(members, mean, [&](auto zero, auto stored_zero) {
    using T = decltype(zero);
    using Stored = decltype(stored_zero);
    const auto* source = reinterpret_cast<const typename Bits<T>::Type*>(members.const_data_ptr<T>());
    auto* target = reinterpret_cast<typename Bits<Stored>::Type*>(mean.mutable_data_ptr<Stored>());
    const MemberRows<typename Bits<T>::Type> rows{
        source, members.stride(0), members.stride(1), members.size(0), members.size(1), members.size(2)};
    check_launch(launch_mean(rows, ValueRows<typename Bits<Stored>::Type>{target, mean.stride(0)}, accumulate, stream), "mean_values");
  });
}

}  // namespace megatron_zpp::cuda
