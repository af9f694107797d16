// Applies the Hadamard transform to groups of 32 neighbouring values, in registers.
//
// One stage turns neighbours (a, b) into sums a + b and differences a - b, and puts all sums before all differences. So the lowest bit of
// a value's index becomes its highest bit. After five stages every value is back in its place, and the stages have combined values at
// distances 1, 2, 4, 8 and 16. Two vectors become one of sums and one of differences:
//
//     a0 b0 a1 b1 | a2 b2 a3 b3     ->     a0+b0 a1+b1 a2+b2 a3+b3 | a0-b0 a1-b1 a2-b2 a3-b3
#pragma once

#include "lanes.h"

namespace megatron_zpp::cpu {

constexpr int kRotatedNumel = 32;
constexpr int kRotationStages = 5;
constexpr int kVectors = kRotatedNumel / kLanes;

struct RotatedGroup {
  Lanes lanes[kVectors];
};

template <class T>
RotatedGroup rotated_group(const T* values) {
  Halves pairs[kVectors / 2];
  for (int i = 0; i < kVectors / 2; ++i) {
    pairs[i] = load_halves(values + i * 2 * kLanes);
  }
  for (int stage = 1;; ++stage) {
    RotatedGroup group;
    for (int i = 0; i < kVectors / 2; ++i) {
      group.lanes[i] = pairs[i].even + pairs[i].odd;
      group.lanes[kVectors / 2 + i] = pairs[i].even - pairs[i].odd;
    }
    if (stage == kRotationStages) {
      return group;
    }
    for (int i = 0; i < kVectors / 2; ++i) {
      pairs[i] = halves(group.lanes[2 * i], group.lanes[2 * i + 1]);
    }
  }
}

// Fills rotated [numel] with the transforms of values [numel], times `factor`, a power of two. numel is a multiple of 32; the two arrays
// may be the same. Returns the largest magnitude, as defined in ValueFormat<float>.
template <class T>
uint32_t rotate(const T* values, int64_t numel, float factor, float* rotated) {
  LaneWords largest{};
  for (int64_t first = 0; first < numel; first += kRotatedNumel) {
    const RotatedGroup group = rotated_group(values + first);
    for (int i = 0; i < kVectors; ++i) {
      const Lanes lanes = group.lanes[i] * factor;
      largest = larger(largest, words_of(lanes) & 0x7fffffffu);
      memcpy(rotated + first + i * kLanes, &lanes, sizeof(lanes));
    }
  }
  return largest_of(largest);
}

}  // namespace megatron_zpp::cpu
