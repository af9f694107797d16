// The CPU implementation of mean_values: checks and the launch.
#pragma once

#include "../arguments.h"
#include "launcher.h"

namespace megatron_zpp::cpu {

inline void mean_values(const at::Tensor& members, at::Tensor& mean, bool accumulate) {
  check_mean_tensors(members, mean, accumulate);
  dispatch_means(members, mean, [&](auto zero, auto stored_zero) {
    using T = decltype(zero);
    const MemberRows<T> rows{
        members.const_data_ptr<T>(), members.stride(0), members.stride(1), members.size(0), members.size(1), members.size(2)};
    launch_mean(rows, writable_values<decltype(stored_zero)>(mean), accumulate);
  });
}

}  // namespace megatron_zpp::cpu
