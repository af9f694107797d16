// The Hadamard transform of a block of 256 fp32 values, in stages of sums and differences at distances 1, 2, 4, ... 128.
//
// Stages at distances below kLanes combine lanes of one vector: every lane adds the other lane of its pair to itself, or to itself with
// the other sign. The others combine vectors. As many of them as registers can hold follow at once; the rest are a second pass.
#pragma once

#include <cstddef>
#include <utility>

#include "../../quantization/cpu/lanes.h"
#include "../format.h"

namespace megatron_zpp::cpu {

constexpr int kGaussianVectors = kGaussianNumel / kLanes;
constexpr int kHeldVectors = kLanes == 16 ? 16 : 8;
constexpr int kPasses = kGaussianVectors / kHeldVectors;  // groups of held vectors, which the second pass combines; 1: there is none
static_assert(kPasses <= kHeldVectors, "the second pass combines one vector of each group");

struct GaussianBlock {
  Lanes vectors[kGaussianVectors];
};

// Lanes that all have the value. It is not added to zeros, because -0 + 0 is 0.
inline Lanes broadcast(float value) { return value - Lanes{}; }

template <int kDistance, size_t... kLane>
Lanes exchanged(Lanes lanes, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(lanes, lanes, (static_cast<int>(kLane) ^ kDistance)...);
#else
  return __builtin_shuffle(lanes, LaneWords{(static_cast<uint32_t>(kLane) ^ kDistance)...});
#endif
}

// Every lane gets the value of the lane at this distance, a power of two.
template <int kDistance>
Lanes exchanged(Lanes lanes) {
  return exchanged<kDistance>(lanes, std::make_index_sequence<kLanes>());
}

template <int kDistance = 1>
Lanes with_lane_stages(Lanes lanes) {
  if constexpr (kDistance == kLanes) {
    return lanes;
  } else {
    const LaneWords flips = (kLaneNumbers & kDistance) * (kSignBit / kDistance);
    return with_lane_stages<2 * kDistance>(exchanged<kDistance>(lanes) + floats_of(words_of(lanes) ^ flips));
  }
}

template <int kVectors>
void vector_stages(Lanes (&held)[kVectors]) {
#pragma GCC unroll 4
  for (int distance = 1; distance < kVectors; distance *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if ((i & distance) == 0) {
        const Lanes low = held[i], high = held[i + distance];
        held[i] = low + high;
        held[i + distance] = low - high;
      }
    }
  }
}

// Transforms the block whose vector i is load(i).
template <class Load>
void hadamard(Load load, GaussianBlock& block) {
  for (int pass = 0; pass < kPasses; ++pass) {
    Lanes held[kHeldVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kHeldVectors; ++i) {
      held[i] = with_lane_stages(load(pass * kHeldVectors + i));
    }
    vector_stages(held);
#pragma GCC unroll 16
    for (int i = 0; i < kHeldVectors; ++i) {
      block.vectors[pass * kHeldVectors + i] = held[i];
    }
  }
  if constexpr (kPasses > 1) {
    for (int i = 0; i < kHeldVectors; ++i) {
      Lanes held[kPasses];
#pragma GCC unroll 8
      for (int pass = 0; pass < kPasses; ++pass) {
        held[pass] = block.vectors[pass * kHeldVectors + i];
      }
      vector_stages(held);
#pragma GCC unroll 8
      for (int pass = 0; pass < kPasses; ++pass) {
        block.vectors[pass * kHeldVectors + i] = held[pass];
      }
    }
  }
}

// The sum of the block: its upper half is added to its lower half, eight times over. Overwrites the block.
inline float sum_of(GaussianBlock& block) {
#pragma GCC unroll 6
  for (int half = kGaussianVectors / 2; half > 0; half /= 2) {
#pragma GCC unroll 32
    for (int i = 0; i < half; ++i) {
      block.vectors[i] += block.vectors[i + half];
    }
  }
  Lanes lanes = block.vectors[0];
#if defined(__AVX512F__)
  lanes += exchanged<8>(lanes);
#endif
#if defined(__AVX__)
  lanes += exchanged<4>(lanes);
#endif
  lanes += exchanged<2>(lanes);
  lanes += exchanged<1>(lanes);
  return lanes[0];
}

}  // namespace megatron_zpp::cpu
