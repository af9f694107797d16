// Starts the kernel on a stream, without torch. ../arguments.h has checked the arguments; pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include "../mask.h"

namespace megatron_zpp::cuda {

template <class T>  // float, Bf16Bits or Fp16Bits
cudaError_t launch_drop(const T* values, T* dropped, int64_t numel, const Mask& mask, cudaStream_t stream);

}  // namespace megatron_zpp::cuda
