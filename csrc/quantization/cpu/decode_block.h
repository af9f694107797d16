// Decodes one block, in loops that compilers vectorise. With AVX-512, shorter code gives the same bits.
#pragma once

#include <c10/util/BFloat16.h>

#include "../block_format.h"
#include "half_loops.h"

#if defined(__AVX512BW__)
// GCC 12 warns about undefined operands inside its own intrinsics (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace megatron_zpp::cpu {

// put: (index, fp32 value).
template <int kBits, class Put>
void for_each_decoded(const uint8_t* __restrict codes, float scale, int64_t numel, Put put) {
  if constexpr (kBits == 8) {
    for (int64_t i = 0; i < numel; ++i) {
      put(i, decoded(static_cast<int8_t>(codes[i]), scale));
    }
  } else {
    for (int64_t pair = 0; pair < numel / 2; ++pair) {
      const CodePair code = load_pair<kBits>(codes, pair);
      put(2 * pair, decoded(code.even, scale));
      put(2 * pair + 1, decoded(code.odd, scale));
    }
  }
}

template <int kBits>
void store_decoded(const uint8_t* __restrict codes, float scale, int64_t numel, float*, float* __restrict values) {
  for_each_decoded<kBits>(codes, scale, numel, [values](int64_t i, float value) { values[i] = value; });
}

// scratch: fp32 [numel].
template <int kBits>
void store_decoded(const uint8_t* __restrict codes, float scale, int64_t numel, float* __restrict scratch, c10::Half* __restrict values) {
  store_decoded<kBits>(codes, scale, numel, nullptr, scratch);
  narrow_to_half(scratch, numel, values);
}

template <int kBits>
void store_decoded_pairs(const uint8_t* __restrict codes, float scale, int64_t numel, c10::BFloat16* __restrict values) {
  for (int64_t pair = 0; pair < numel / 2; ++pair) {
    const CodePair code = load_pair<kBits>(codes, pair);
    const uint32_t word = nearest_bf16(decoded(code.even, scale)) | nearest_bf16(decoded(code.odd, scale)) << 16;
    memcpy(values + 2 * pair, &word, sizeof(word));
  }
}

#if defined(__AVX512BF16__)
// The instruction flushes subnormal fp32 to zero. So this is for normal scales only, whose multiples are normal or 0.
inline void store_decoded_normal(const uint8_t* codes, float scale, int64_t numel, c10::BFloat16* values) {
  const __m512 scales = _mm512_set1_ps(scale);
  const auto decoded_16 = [scales](const uint8_t* some_codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(some_codes));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scales);
  };
  for (int64_t i = 0; i < numel; i += 32) {
    const __m512bh narrow = _mm512_cvtne2ps_pbh(decoded_16(codes + i + 16), decoded_16(codes + i));
    memcpy(values + i, &narrow, sizeof(narrow));
  }
}
#endif

#if defined(__AVX512BW__)
// A block of 4-bit codes has at most 16 different values, which fit a table in one register.
inline void store_looked_up(const uint8_t* codes, float scale, int64_t numel, c10::BFloat16* values) {
  uint16_t table[32];
  for (int32_t nibble = 0; nibble < 32; ++nibble) {
    table[nibble] = static_cast<uint16_t>(nearest_bf16(decoded(((nibble & 0xf) ^ 8) - 8, scale)));
  }
  const __m512i entries = _mm512_loadu_si512(table);
  for (int64_t i = 0; i < numel; i += 32) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2)));
    const __m512i nibbles = _mm512_cvtepu8_epi16(_mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4)));
    // Lookups read the low 5 bits; both halves of the table are the same, so that the fifth does not matter.
    _mm512_storeu_si512(values + i, _mm512_permutexvar_epi16(nibbles, entries));
  }
}
#endif

template <int kBits>
void store_decoded(const uint8_t* codes, float scale, int64_t numel, float*, c10::BFloat16* values) {
#if defined(__AVX512BW__)
  if constexpr (kBits == 4) {
    return store_looked_up(codes, scale, numel, values);
  }
#endif
#if defined(__AVX512BF16__)
  constexpr float kSmallestNormal = 0x1p-126f;
  if (kBits == 8 && scale >= kSmallestNormal) {
    return store_decoded_normal(codes, scale, numel, values);
  }
#endif
  store_decoded_pairs<kBits>(codes, scale, numel, values);
}

template <int kBits, class T>
void decode_block(const uint8_t* codes, float scale, int64_t numel, float* scratch, T* values) {
  constexpr uint32_t kInfinity = ValueFormat<float>::kInfinity;
  if (ValueFormat<float>::magnitude(scale) >= kInfinity) {
    // NaN or infinity. No block is encoded with an infinite scale, but all bytes must decode to the same bits everywhere: 0 * inf is NaN.
    for_each_decoded<kBits>(codes, scale, numel, [values](int64_t i, float value) { values[i] = static_cast<T>(with_canonical_nan(value)); });
  } else {
    store_decoded<kBits>(codes, scale, numel, scratch, values);
  }
}

}  // namespace megatron_zpp::cpu
