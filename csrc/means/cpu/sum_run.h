// Sums neighbouring values in fp32 and stores their mean, in loops that compilers vectorise.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "../../quantization/block_format.h"
#include "../../quantization/cpu/half_loops.h"

namespace megatron_zpp::cpu {

constexpr int64_t kPartNumel = 2048;  // 8 KiB of fp32 on the stack

// In each function numel is at most kPartNumel.

inline void add_run(const float* __restrict values, int64_t numel, float* __restrict total) {
  for (int64_t i = 0; i < numel; ++i) {
    total[i] += values[i];
  }
}

inline void add_run(const c10::BFloat16* __restrict values, int64_t numel, float* __restrict total) {
  for (int64_t i = 0; i < numel; ++i) {
    total[i] += float_of(static_cast<uint32_t>(values[i].x) << 16);
  }
}

inline void add_run(const c10::Half* values, int64_t numel, float* total) {
  float wide[kPartNumel];
  widen_half(values, numel, wide);
  add_run(wide, numel, total);
}

inline void store_run(const float* __restrict means, int64_t numel, bool accumulate, float* __restrict stored) {
  if (accumulate) {
    add_run(means, numel, stored);
  } else {
    std::copy(means, means + numel, stored);
  }
}

inline void store_run(const float* __restrict means, int64_t numel, bool, c10::BFloat16* __restrict stored) {
  for (int64_t i = 0; i < numel; ++i) {
    stored[i].x = narrowed_to_bf16(means[i]);
  }
}

inline void store_run(const float* means, int64_t numel, bool, c10::Half* stored) {
  narrow_to_half(means, numel, stored);
}

}  // namespace megatron_zpp::cpu
