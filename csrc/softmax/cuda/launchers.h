// Starts the kernels on a stream, without torch. ../arguments.h has checked the arguments; pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include "../rows.h"

namespace megatron_zpp::cuda {

template <class T>  // float, Bf16Bits or Fp16Bits
cudaError_t launch_softmax_parts(const LogitRows<T>& rows, const TokenSums<float>& sums, float* label, cudaStream_t stream);

template <class T>
cudaError_t launch_softmax_gradient(
    const LogitRows<T>& rows, const TokenSums<const float>& sums, const float* grad_loss, ValueRows<T> gradient, cudaStream_t stream);

}  // namespace megatron_zpp::cuda
