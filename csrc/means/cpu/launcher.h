// Starts the kernel on the threads of at::parallel_for, without torch's tensors. ../arguments.h has checked the arguments.
#pragma once

#include "../rows.h"

namespace megatron_zpp::cpu {

template <class T, class Stored>  // T: float, c10::BFloat16 or c10::Half; Stored: T or float
void launch_mean(const MemberRows<T>& members, const ValueRows<Stored>& means, bool accumulate);

}  // namespace megatron_zpp::cpu
