// Starts the kernel on a stream, without torch. ../arguments.h has checked the arguments; pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include "../rows.h"

namespace megatron_zpp::cuda {

template <class T, class Stored>  // T: float, Bf16Bits or Fp16Bits; Stored: T or float
cudaError_t launch_mean(const MemberRows<T>& members, const ValueRows<Stored>& means, bool accumulate, cudaStream_t stream);

}  // namespace megatron_zpp::cuda
