// Starts the kernel on the threads of at::parallel_for, without torch's tensors. ../arguments.h has checked the arguments.
#pragma once

#include "../mask.h"

namespace megatron_zpp::cpu {

template <class T>  // float, c10::BFloat16 or c10::Half
void launch_drop(const T* values, T* dropped, int64_t numel, const Mask& mask);

}  // namespace megatron_zpp::cpu
