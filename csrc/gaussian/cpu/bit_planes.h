// Bits of vectors of values, as they lie in bit planes and in the random signs.
#pragma once

#include "../../quantization/cpu/lanes.h"
#include "../format.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace megatron_zpp::cpu {

// The highest bits of the lanes.
inline uint32_t highest_bits(LaneWords lanes) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(lanes));
#elif defined(__AVX512F__)
  return _mm512_cmplt_epi32_mask(reinterpret_cast<__m512i>(lanes), _mm512_setzero_si512());
#elif defined(__AVX__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(lanes)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(lanes)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) {
    bits |= (lanes[i] >> (kWordBits - 1)) << i;
  }
  return bits;
#endif
}

// Puts the bits of vector number `vector` to their place in a plane of zeros.
inline void set_bits(uint32_t (&plane)[kPlaneWords], int vector, uint32_t bits) {
  plane[vector * kLanes / kWordBits] |= bits << (vector * kLanes % kWordBits);
}

// All ones in the lanes of vector number `vector` whose bit is 1, else zeros.
inline LaneWords lanes_with_bit(const uint32_t (&plane)[kPlaneWords], int vector) {
  constexpr LaneWords kOne = LaneWords{} + 1u, kBitOfLane = kOne << kLaneNumbers;
  const uint32_t bits = plane[vector * kLanes / kWordBits] >> (vector * kLanes % kWordBits);
#if defined(__AVX512F__)
  return reinterpret_cast<LaneWords>(((LaneWords{} + bits) & kBitOfLane) != 0);  // one instruction
#else
  return reinterpret_cast<LaneWords>(((LaneWords{} + bits) & kBitOfLane) == kBitOfLane);  // there is none for !=
#endif
}

// The lanes of `left` where the mask is all ones, of `right` where it is zeros.
template <class Mask>
Lanes chosen(Mask mask, Lanes left, Lanes right) {
#if defined(__SSE2__) && !defined(__SSE4_1__)
  // SSE2 has no instruction that blends; what compilers make of the other line takes one more instruction than this.
  return floats_of(words_of(right) ^ (reinterpret_cast<LaneWords>(mask) & (words_of(left) ^ words_of(right))));
#else
  return mask ? left : right;
#endif
}

// The lanes with the sign changed where the bit is 1.
inline Lanes flipped(Lanes lanes, const uint32_t (&plane)[kPlaneWords], int vector) {
  return floats_of(words_of(lanes) ^ (lanes_with_bit(plane, vector) & kSignBit));
}

}  // namespace megatron_zpp::cpu
