// Hadamard transforms of groups of 32 neighbouring values, in registers.
//
// One stage turns neighbours (a, b) into sums a + b, all of which come first, and differences a - b. So the index of a value loses its
// lowest bit and gets it back as its highest: after five stages every value is back in its place, and the stages have joined values at
// distances 1, 2, 4, 8 and 16. Two vectors become one of sums and one of differences:
//
//     a0 b0 a1 b1 | a2 b2 a3 b3     ->     a0+b0 a1+b1 a2+b2 a3+b3 | a0-b0 a1-b1 a2-b2 a3-b3
#pragma once

#include <cstdint>
#include <cstring>

namespace megatron_zpp::cpu {

constexpr int kRotatedNumel = 32;
constexpr int kRotationStages = 5;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#define ZPP_EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ZPP_ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
constexpr int kLanes = 8;
#define ZPP_EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ZPP_ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#else
constexpr int kLanes = 4;
#define ZPP_EVEN_LANES 0, 2, 4, 6
#define ZPP_ODD_LANES 1, 3, 5, 7
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
constexpr int kVectors = kRotatedNumel / kLanes;

#if defined(__clang__)
inline Lanes even_lanes(Lanes left, Lanes right) { return __builtin_shufflevector(left, right, ZPP_EVEN_LANES); }
inline Lanes odd_lanes(Lanes left, Lanes right) { return __builtin_shufflevector(left, right, ZPP_ODD_LANES); }
#else
typedef int32_t LaneIndices __attribute__((vector_size(kLanes * sizeof(int32_t))));
inline Lanes even_lanes(Lanes left, Lanes right) { return __builtin_shuffle(left, right, LaneIndices{ZPP_EVEN_LANES}); }
inline Lanes odd_lanes(Lanes left, Lanes right) { return __builtin_shuffle(left, right, LaneIndices{ZPP_ODD_LANES}); }
#endif
#undef ZPP_EVEN_LANES
#undef ZPP_ODD_LANES

inline void rotate_group(Lanes (&group)[kVectors]) {
  for (int stage = 0; stage < kRotationStages; ++stage) {
    Lanes sums[kVectors / 2], differences[kVectors / 2];
    for (int i = 0; i < kVectors / 2; ++i) {
      const Lanes even = even_lanes(group[2 * i], group[2 * i + 1]);
      const Lanes odd = odd_lanes(group[2 * i], group[2 * i + 1]);
      sums[i] = even + odd;
      differences[i] = even - odd;
    }
    for (int i = 0; i < kVectors / 2; ++i) {
      group[i] = sums[i];
      group[kVectors / 2 + i] = differences[i];
    }
  }
}

// Rotates values [numel] in place, numel a multiple of 32, and multiplies them by `factor`, a power of two.
inline void rotate(float* values, int64_t numel, float factor) {
  for (int64_t first = 0; first < numel; first += kRotatedNumel) {
    Lanes group[kVectors];
    memcpy(group, values + first, sizeof(group));
    rotate_group(group);
    for (Lanes& lanes : group) {
      lanes *= factor;
    }
    memcpy(values + first, group, sizeof(group));
  }
}

}  // namespace megatron_zpp::cpu
