// Decodes one block of 256 values.
#pragma once

#include <algorithm>

#include "../../quantization/cpu/half_loops.h"
#include "bit_planes.h"
#include "hadamard.h"

namespace megatron_zpp::cpu {

// The entry of `table` whose index is the number that the bits in `is_set` form, by halves of the table.
template <int kBits>
Lanes looked_up(const Lanes* table, const LaneWords* is_set) {
  if constexpr (kBits == 0) {
    return table[0];
  } else {
    constexpr int kHalf = 1 << (kBits - 1);
    return chosen(is_set[kBits - 1], looked_up<kBits - 1>(table + kHalf, is_set), looked_up<kBits - 1>(table, is_set));
  }
}

// Fills values [256] with the decoded block; no NaN is canonical yet. planes: with the codes of a block.
template <int kBits>
void decode_gaussian_block(const uint8_t* planes, uint16_t scale, int rounds, const Signs (&signs)[kMostRounds], float* values) {
  constexpr int kMagnitudes = GaussianLevels<kBits>::kMagnitudes;
  if (!is_finite_scale(scale)) {
    std::fill(values, values + kGaussianNumel, float_of(kNanScaleBits));
    return;
  }
  uint32_t words[kBits][kPlaneWords];
  memcpy(words, planes, sizeof(words));
  const float factor = decoding_factor(scale, rounds);
  Lanes table[kMagnitudes];
  for (int magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
    table[magnitude] = broadcast(level<kBits>(magnitude) * factor);
  }
  GaussianBlock block;
  hadamard(
      [&](int i) {
        LaneWords is_set[kBits];
        for (int bit = 0; bit < kBits - 1; ++bit) {
          is_set[bit] = lanes_with_bit(words[1 + bit], i);
        }
        return flipped(looked_up<kBits - 1>(table, is_set), words[0], i);
      },
      block);
  if (rounds > 1) {
    hadamard([&](int i) { return flipped(block.vectors[i], signs[1].words, i); }, block);
  }
  for (int i = 0; i < kGaussianVectors; ++i) {
    const Lanes lanes = flipped(block.vectors[i], signs[0].words, i);
    memcpy(values + i * kLanes, &lanes, sizeof(lanes));
  }
}

// In each store, values [256] become `decoded`, or the sums with `decoded` if accumulate.
inline void store_block(const float* __restrict decoded, bool accumulate, float* __restrict values) {
  if (accumulate) {
    for (int i = 0; i < kGaussianNumel; ++i) {
      values[i] = with_canonical_nan(values[i] + decoded[i]);
    }
  } else {
    for (int i = 0; i < kGaussianNumel; ++i) {
      values[i] = with_canonical_nan(decoded[i]);
    }
  }
}

inline void store_block(const float* __restrict decoded, bool accumulate, c10::BFloat16* __restrict values) {
  for (int i = 0; i < kGaussianNumel; ++i) {
    const float value = accumulate ? float_of(static_cast<uint32_t>(values[i].x) << 16) + decoded[i] : decoded[i];
    values[i].x = narrowed_to_bf16(value);
  }
}

inline void store_block(const float* __restrict decoded, bool accumulate, c10::Half* __restrict values) {
  float wide[kGaussianNumel];
  if (accumulate) {
    widen_half(values, kGaussianNumel, wide);
  }
  store_block(decoded, accumulate, wide);
  narrow_to_half(wide, kGaussianNumel, values);
}

}  // namespace megatron_zpp::cpu
