// Converts arrays of fp16 to fp32 and back.
#pragma once

#include <c10/util/Half.h>

#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace megatron_zpp::cpu {

inline void widen_half(const c10::Half* __restrict values, int64_t numel, float* __restrict wide) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i < numel / 8 * 8; i += 8) {
    _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i))));
  }
#endif
  for (; i < numel; ++i) {
    wide[i] = static_cast<float>(values[i]);
  }
}

inline void narrow_to_half(const float* __restrict wide, int64_t numel, c10::Half* __restrict values) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i < numel / 8 * 8; i += 8) {
    const __m128i narrow = _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i), narrow);
  }
#endif
  for (; i < numel; ++i) {
    values[i] = static_cast<c10::Half>(wide[i]);
  }
}

}  // namespace megatron_zpp::cpu
