// The CPU implementation of drop_values: checks and the launch.
#pragma once

#include "../../quantization/arguments.h"
#include "../arguments.h"
#include "launcher.h"

namespace megatron_zpp::cpu {

inline void drop_values(const at::Tensor& values, at::Tensor& dropped, int64_t key, int64_t first_index, int64_t threshold, double scale) {
  check_dropout_tensors(values, dropped);
  const Mask mask = mask_of(key, first_index, threshold, scale);
  dispatch_values(values, "values", [&](auto zero) {
    using T = decltype(zero);
    launch_drop(values.const_data_ptr<T>(), dropped.mutable_data_ptr<T>(), values.numel(), mask);
  });
}

}  // namespace megatron_zpp::cpu
