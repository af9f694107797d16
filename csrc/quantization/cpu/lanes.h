// Vectors as wide as the processor's registers, for loops that compilers do not vectorise well by themselves.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#include "../block_format.h"
#include "half_loops.h"

namespace megatron_zpp::cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#define ZPP_EACH_LANE 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define ZPP_EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ZPP_ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
constexpr int kLanes = 8;
#define ZPP_EACH_LANE 0, 1, 2, 3, 4, 5, 6, 7
#define ZPP_EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ZPP_ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#else
constexpr int kLanes = 4;
#define ZPP_EACH_LANE 0, 1, 2, 3
#define ZPP_EVEN_LANES 0, 2, 4, 6
#define ZPP_ODD_LANES 1, 3, 5, 7
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t LaneWords __attribute__((vector_size(kLanes * sizeof(uint32_t))));

constexpr LaneWords kLaneNumbers = {ZPP_EACH_LANE};

inline LaneWords words_of(Lanes lanes) { return reinterpret_cast<LaneWords>(lanes); }
inline Lanes floats_of(LaneWords words) { return reinterpret_cast<Lanes>(words); }
inline LaneWords larger(LaneWords left, LaneWords right) { return left > right ? left : right; }

inline uint32_t largest_of(LaneWords words) {
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) {
    largest = words[i] > largest ? words[i] : largest;
  }
  return largest;
}

// The values at even and at odd indices of 2 * kLanes neighbours.
struct Halves {
  Lanes even;
  Lanes odd;
};

inline Halves halves(Lanes left, Lanes right) {
#if defined(__clang__)
  return {__builtin_shufflevector(left, right, ZPP_EVEN_LANES), __builtin_shufflevector(left, right, ZPP_ODD_LANES)};
#else
  return {__builtin_shuffle(left, right, LaneWords{ZPP_EVEN_LANES}), __builtin_shuffle(left, right, LaneWords{ZPP_ODD_LANES})};
#endif
}
#undef ZPP_EACH_LANE
#undef ZPP_EVEN_LANES
#undef ZPP_ODD_LANES

inline Halves load_halves(const float* values) {
  Lanes lanes[2];
  memcpy(lanes, values, sizeof(lanes));
  return halves(lanes[0], lanes[1]);
}

inline Halves load_halves(const c10::BFloat16* values) {
  LaneWords words;
  memcpy(&words, values, sizeof(words));
  return {floats_of(words << 16), floats_of(words & 0xffff0000u)};
}

inline Halves load_halves(const c10::Half* values) {
  float wide[2 * kLanes];
  widen_half(values, 2 * kLanes, wide);
  return load_halves(wide);
}

// Stores the codes, which are the low bits of the words at even and at odd indices.
template <int kBits>
void store_halves(uint8_t* codes, LaneWords even, LaneWords odd) {
  if constexpr (kBits == 8) {
    typedef uint16_t Pairs __attribute__((vector_size(kLanes * sizeof(uint16_t))));
    const Pairs pairs = __builtin_convertvector((even & 0xffu) | (odd << 8), Pairs);
    memcpy(codes, &pairs, sizeof(pairs));
  } else {
    typedef uint8_t Pairs __attribute__((vector_size(kLanes * sizeof(uint8_t))));
    const Pairs pairs = __builtin_convertvector((even & 0xfu) | (odd << 4), Pairs);
    memcpy(codes, &pairs, sizeof(pairs));
  }
}

}  // namespace megatron_zpp::cpu
