// The format of Gaussian codes: levels and thresholds, the power of two before squaring, the scale, and where they lie in a payload row.
// One definition for host and device. A payload row holds blocks of 256 values, and after them bytes of the caller:
//
//     | scales bf16, padded to 16 bytes | per block: bit planes of 32 bytes | bytes that no kernel touches |
//
// The first plane of a block has the signs of the levels, the others the bits of their magnitudes, the lowest first. Bit i % 8 of byte
// i / 8 of a plane belongs to value i. megatron_zpp/ops/gaussian_reference.py says what is computed.
#pragma once

#include "../quantization/noise.h"
#include "../quantization/rows.h"

namespace megatron_zpp {

constexpr int kGaussianNumel = 256;
constexpr int kPlaneBytes = kGaussianNumel / 8;
constexpr int kWordBits = 32;
constexpr int kPlaneWords = kGaussianNumel / kWordBits;
constexpr int kMostRounds = 2;
constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint16_t kNanScale = ValueFormat<Bf16Bits>::kNan;

// ---- Levels ----------------------------------------------------------------------------------------------------------------------------

// For a Gaussian of variance 1 the levels with the least mean square error (Lloyd, Max).
template <int kBits>
struct GaussianLevels {
  static_assert(kBits >= 1 && kBits <= 4, "Gaussian codes have 1 to 4 bits");
  static constexpr int kMagnitudes = 1 << (kBits - 1);
};

// magnitude: 0 to kMagnitudes - 1.
template <int kBits>
ZPP_HOST_DEVICE constexpr float level(int magnitude) {
  if constexpr (kBits == 1) {
    return 0.79788f;
  } else if constexpr (kBits == 2) {
    constexpr float kLevels[] = {0.45278f, 1.51042f};
    return kLevels[magnitude];
  } else if constexpr (kBits == 3) {
    constexpr float kLevels[] = {0.24509f, 0.75601f, 1.34391f, 2.15195f};
    return kLevels[magnitude];
  } else {
    constexpr float kLevels[] = {0.12840f, 0.38805f, 0.65676f, 0.94234f, 1.25623f, 1.61805f, 2.06902f, 2.73259f};
    return kLevels[magnitude];
  }
}

// The square of the threshold between the levels of magnitude - 1 and magnitude: 1 to kMagnitudes - 1.
template <int kBits>
ZPP_HOST_DEVICE constexpr float squared_threshold(int magnitude) {
  static_assert(kBits > 1, "codes of 1 bit are signs");
  if constexpr (kBits == 2) {
    return static_cast<float>(0.98160 * 0.98160);
  } else if constexpr (kBits == 3) {
    constexpr double kThresholds[] = {0.50055, 1.04996, 1.74793};
    return static_cast<float>(kThresholds[magnitude - 1] * kThresholds[magnitude - 1]);
  } else {
    constexpr double kThresholds[] = {0.25822, 0.52240, 0.79955, 1.09929, 1.43714, 1.84353, 2.40080};
    return static_cast<float>(kThresholds[magnitude - 1] * kThresholds[magnitude - 1]);
  }
}

// ---- Scales ----------------------------------------------------------------------------------------------------------------------------

// The power of two that brings the largest magnitude of a block to 1 or just above, and its inverse; both are normal numbers.
struct Prescale {
  float down;
  float up;
};

// largest: of a block, finite, as defined in ValueFormat<float>.
ZPP_HOST_DEVICE Prescale prescale_of(uint32_t largest) {
  constexpr uint32_t kBias = 127, kLargestExponent = 126, kExponentShift = 23;
  uint32_t biased = largest >> kExponentShift;
  biased = biased < kBias - kLargestExponent ? kBias - kLargestExponent : biased;
  biased = biased > kBias + kLargestExponent ? kBias + kLargestExponent : biased;
  return {float_of((2 * kBias - biased) << kExponentShift), float_of(biased << kExponentShift)};
}

// H H = 256: half of it is taken when values are encoded, half when they are decoded.
ZPP_HOST_DEVICE constexpr float scale_of_rounds(int rounds) { return rounds == 1 ? 1.0f / 16 : 1.0f / 256; }

// square: the sum of squares.
ZPP_HOST_DEVICE float variance_of(float square) { return square * (1.0f / kGaussianNumel); }

// The scale as bf16 bits, of a block that is not all zeros. square: the sum of squares; product: the sum of products with levels.
ZPP_HOST_DEVICE uint16_t gaussian_scale(float square, float product, int rounds, float up) {
  const uint32_t nearest = nearest_bf16(square / product * scale_of_rounds(rounds) * up);
  return nearest < ValueFormat<Bf16Bits>::kInfinity ? static_cast<uint16_t>(nearest) : kNanScale;
}

ZPP_HOST_DEVICE bool is_finite_scale(uint16_t scale) { return (scale & 0x7fffu) < ValueFormat<Bf16Bits>::kInfinity; }

// Whether a block that was encoded with this scale has codes other than 0.
ZPP_HOST_DEVICE bool has_gaussian_codes(uint16_t scale) { return scale != 0 && scale != kNanScale; }

// What levels are multiplied by before they are rotated back.
ZPP_HOST_DEVICE float decoding_factor(uint16_t scale, int rounds) {
  return float_of(static_cast<uint32_t>(scale) << 16) * scale_of_rounds(rounds);
}

// ---- Signs -----------------------------------------------------------------------------------------------------------------------------

// The random signs of one round: bit i % 32 of word i / 32 belongs to value i; 1 is minus.
struct Signs {
  uint32_t words[kPlaneWords];
};

ZPP_HOST_DEVICE Signs signs_of_round(const Noise& noise, int round) {
  Signs signs;
  const PairHashes hashes = pair_hashes(noise, round * kPlaneWords);
  for (int i = 0; i < kPlaneWords; ++i) {
    signs.words[i] = hashes.at(i);
  }
  return signs;
}

// ---- Rows ------------------------------------------------------------------------------------------------------------------------------

ZPP_HOST_DEVICE constexpr int64_t planes_offset(int64_t blocks) { return padded_bytes(blocks * static_cast<int64_t>(sizeof(uint16_t))); }

template <class Byte>  // uint8_t or const uint8_t
struct GaussianRows {
  PayloadRows<Byte> rows;

  ZPP_HOST_DEVICE int64_t blocks() const { return rows.layout.blocks; }
  ZPP_HOST_DEVICE auto* scales(int64_t member, int64_t slice) const {
    using Scale = std::conditional_t<std::is_const_v<Byte>, const uint16_t, uint16_t>;
    return reinterpret_cast<Scale*>(rows.codes(member, slice));
  }
  ZPP_HOST_DEVICE Byte* planes(int64_t member, int64_t slice) const { return rows.codes(member, slice) + planes_offset(blocks()); }
};

}  // namespace megatron_zpp
