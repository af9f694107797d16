// Applies the mask to neighbouring values, in loops that compilers vectorise.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "../../quantization/cpu/half_loops.h"
#include "../mask.h"

namespace megatron_zpp::cpu {

constexpr int64_t kRunNumel = 1024;  // 4 KiB of fp32 on the stack

// In each drop_run numel is at most kRunNumel, and `hashes` are those of the first value and of all after it.
inline void drop_run(const float* __restrict values, int32_t numel, const PairHashes& hashes, const Mask& mask, float* __restrict dropped) {
  const uint32_t threshold = mask.threshold, counter = hashes.counter, word = hashes.word;
  const float scale = mask.scale;
  for (int32_t i = 0; i < numel; ++i) {
    const float kept = with_canonical_nan(values[i] * scale);
    dropped[i] = hashed(counter + static_cast<uint32_t>(i), word) < threshold ? 0.0f : kept;
  }
}

inline void drop_run(
    const c10::BFloat16* __restrict values, int32_t numel, const PairHashes& hashes, const Mask& mask, c10::BFloat16* __restrict dropped) {
  const uint32_t threshold = mask.threshold, counter = hashes.counter, word = hashes.word;
  const float scale = mask.scale;
  for (int32_t i = 0; i < numel; ++i) {
    const uint16_t kept = narrowed_to_bf16(float_of(static_cast<uint32_t>(values[i].x) << 16) * scale);
    dropped[i].x = hashed(counter + static_cast<uint32_t>(i), word) < threshold ? uint16_t{0} : kept;
  }
}

inline void drop_run(const c10::Half* values, int32_t numel, const PairHashes& hashes, const Mask& mask, c10::Half* dropped) {
  float wide[kRunNumel], wide_dropped[kRunNumel];
  widen_half(values, numel, wide);
  drop_run(wide, numel, hashes, mask, wide_dropped);
  narrow_to_half(wide_dropped, numel, dropped);
}

// Values begin to end of those that the mask is for.
template <class T>
void drop_range(const T* values, int64_t begin, int64_t end, const Mask& mask, T* dropped) {
  for (int64_t numel = 0; begin < end; begin += numel) {
    numel = std::min({kRunNumel, end - begin, mask.before_carry(begin)});
    drop_run(values + begin, static_cast<int32_t>(numel), mask.hashes(begin), mask, dropped + begin);
  }
}

}  // namespace megatron_zpp::cpu
