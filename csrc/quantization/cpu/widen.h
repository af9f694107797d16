// Values of any dtype to fp32, many at a time.
#pragma once

#include <c10/util/BFloat16.h>

#include "../block_format.h"
#include "half_loops.h"

namespace megatron_zpp::cpu {

inline void widen(const float* __restrict values, int64_t numel, float* __restrict wide) { memcpy(wide, values, numel * sizeof(float)); }

inline void widen(const c10::BFloat16* __restrict values, int64_t numel, float* __restrict wide) {
  for (int64_t i = 0; i < numel; ++i) {
    wide[i] = float_of(static_cast<uint32_t>(values[i].x) << 16);
  }
}

// numel is a multiple of 8.
inline void widen(const c10::Half* __restrict values, int64_t numel, float* __restrict wide) { widen_half(values, numel, wide); }

}  // namespace megatron_zpp::cpu
