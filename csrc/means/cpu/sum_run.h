// Sums neighbouring values in fp32 and stores their mean, in loops that compilers vectorise.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "../../quantization/block_format.h"
#include "../../quantization/cpu/half_loops.h"

namespace megatron_zpp::cpu {

constexpr int64_t kPartNumel = 2048;    // 8 KiB of fp32 on the stack
constexpr int64_t kHalvesMultiple = 8;    // of half_loops.h

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
  const int64_t whole = numel / kHalvesMultiple * kHalvesMultiple;
  widen_half(values, whole, wide);
  std::copy(values + whole, values + numel, wide + whole);
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
    const uint32_t bits = bits_of(means[i]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    stored[i].x = static_cast<uint16_t>(means[i] != means[i] ? ValueFormat<Bf16Bits>::kNan : rounded);
  }
}

inline void store_run(const float* means, int64_t numel, bool, c10::Half* stored) {
  const int64_t whole = numel / kHalvesMultiple * kHalvesMultiple;
  narrow_to_half(means, whole, stored);
  std::transform(means + whole, means + numel, stored + whole, [](float value) { return static_cast<c10::Half>(value); });
}

}  // namespace megatron_zpp::cpu
