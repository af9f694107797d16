// Encodes one block of 256 values.
#pragma once

#include <algorithm>

#include "../../quantization/cpu/half_loops.h"
#include "bit_planes.h"
#include "hadamard.h"

namespace megatron_zpp::cpu {

inline const float* widened(const float* values, float*) { return values; }

// wide: fp32 [256].
inline const float* widened(const c10::BFloat16* values, float* wide) {
  for (int i = 0; i < kGaussianNumel; ++i) {
    wide[i] = float_of(static_cast<uint32_t>(values[i].x) << 16);
  }
  return wide;
}

inline const float* widened(const c10::Half* values, float* wide) {
  widen_half(values, kGaussianNumel, wide);
  return wide;
}

inline Lanes load_lanes(const float* values, int vector) {
  Lanes lanes;
  memcpy(&lanes, values + vector * kLanes, sizeof(lanes));
  return lanes;
}

inline uint32_t largest_of_block(const float* values) {
  LaneWords largest{};
  for (int i = 0; i < kGaussianVectors; ++i) {
    largest = larger(largest, words_of(load_lanes(values, i)) & ~kSignBit);
  }
  return largest_of(largest);
}

// Fills `block` with the values times `factor` after `rounds` rounds of rotation.
inline void rotate(const float* values, float factor, int rounds, const Signs (&signs)[kMostRounds], GaussianBlock& block) {
  hadamard([&](int i) { return flipped(load_lanes(values, i) * factor, signs[0].words, i); }, block);
  if (rounds > 1) {
    hadamard([&](int i) { return flipped(block.vectors[i], signs[1].words, i); }, block);
  }
}

inline GaussianBlock squares_of(const GaussianBlock& block) {
  GaussianBlock squares;
  for (int i = 0; i < kGaussianVectors; ++i) {
    squares.vectors[i] = block.vectors[i] * block.vectors[i];
  }
  return squares;
}

template <int kBits>
struct Quantized {
  uint32_t planes[kBits][kPlaneWords];
  float product;  // the sum of products of values with their levels
};

template <int kBits>
void quantize(const GaussianBlock& block, float variance, Quantized<kBits>& quantized) {
  constexpr int kMagnitudes = GaussianLevels<kBits>::kMagnitudes;
  Lanes thresholds[kMagnitudes];
  if constexpr (kBits > 1) {
#pragma GCC unroll 8
    for (int magnitude = 1; magnitude < kMagnitudes; ++magnitude) {
      thresholds[magnitude] = broadcast(squared_threshold<kBits>(magnitude) * variance);
    }
  }
  GaussianBlock products;
#pragma GCC unroll 2
  for (int i = 0; i < kGaussianVectors; ++i) {
    const Lanes square = block.vectors[i] * block.vectors[i], size = floats_of(words_of(block.vectors[i]) & ~kSignBit);
    set_bits(quantized.planes[0], i, highest_bits(words_of(block.vectors[i])));
    Lanes levels = broadcast(level<kBits>(0));
    LaneWords magnitudes{};
#pragma GCC unroll 8
    for (int magnitude = 1; magnitude < kMagnitudes; ++magnitude) {
      const auto is_above = square > thresholds[magnitude];
      levels = chosen(is_above, broadcast(level<kBits>(magnitude)), levels);
      magnitudes -= reinterpret_cast<LaneWords>(is_above);
    }
#pragma GCC unroll 3
    for (int bit = 0; bit < kBits - 1; ++bit) {
      set_bits(quantized.planes[1 + bit], i, highest_bits(magnitudes << (kWordBits - 1 - bit)));
    }
    products.vectors[i] = size * levels;
  }
  quantized.product = sum_of(products);
}

// Fills the planes, and returns the scale as bf16 bits. values: fp32 [256].
template <int kBits>
uint16_t encode_gaussian_block(const float* values, int rounds, const Signs (&signs)[kMostRounds], uint8_t* planes) {
  const uint32_t largest = largest_of_block(values);
  Quantized<kBits> quantized{};
  uint16_t scale = largest == 0 ? 0 : kNanScale;
  if (largest != 0 && largest < ValueFormat<float>::kInfinity) {
    const Prescale prescale = prescale_of(largest);
    GaussianBlock block;
    rotate(values, prescale.down, rounds, signs, block);
    GaussianBlock squares = squares_of(block);
    const float square = sum_of(squares);
    quantize(block, variance_of(square), quantized);
    scale = gaussian_scale(square, quantized.product, rounds, prescale.up);
  }
  if (has_gaussian_codes(scale)) {
    memcpy(planes, quantized.planes, sizeof(quantized.planes));
  } else {
    memset(planes, 0, sizeof(quantized.planes));
  }
  return scale;
}

}  // namespace megatron_zpp::cpu
