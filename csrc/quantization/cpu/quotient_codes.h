// Codes of fp32 quotients by way of one multiplication each, where that is sure to give the codes of the division.
//
// With i = fl(1 / s), fl(x * i) is within |x / s| * 2^-24 and half an ulp of x / s, and fl(x / s) within half an ulp; adding noise rounds
// both sums by half an ulp more. All are below Q + 1, a power of two, so half an ulp is at most (Q + 1) * 2^-25: together they differ by
// less than 6 * (Q + 1) * 2^-25 < (Q + 1) * 2^-22. Clamping moves them no further apart. So if what was multiplied is at least that far
// from every half-integer, what was divided is on the same side, and both round to the same code. Few values are nearer: their chunk
// divides.
#pragma once

#include <algorithm>

#include "../noise.h"
#include "lanes.h"

namespace megatron_zpp::cpu {

// Where 1 / s is normal, and x / s for |x| of at most s * Q, or so small that the code is that of 0 either way.
constexpr float kSmallestInvertedScale = 0x1p-100f;
constexpr float kLargestInvertedScale = 0x1p+100f;

constexpr int64_t kChunkNumel = 256;  // one uncertain value in 2^14 (8 bits) makes 1 chunk of 64 divide

// Noise for kLanes pairs of values.
inline Halves noise_of(LaneWords hashes) {
  constexpr uint32_t kOneAndHalfStep = 0x3f800040u;
  const LaneWords even = ((hashes << 7) & 0x007fff80u) | kOneAndHalfStep, odd = ((hashes >> 9) & 0x007fff80u) | kOneAndHalfStep;
  return {floats_of(even) - 1.5f, floats_of(odd) - 1.5f};
}

inline LaneWords distance_from_integer(Lanes value, Lanes shifted) { return words_of(value - (shifted - kRoundingShift)) & 0x7fffffffu; }

// Stores the integers nearest to quotients(values, index). Returns whether all are farther from half-integers than two ways to the same
// quotients can be from each other.
template <int kBits, class T, class Quotients>
bool store_rounded(const T* values, int64_t numel, uint8_t* codes, Quotients quotients) {
  constexpr float kMargin = static_cast<float>(CodeFormat<kBits>::kLargest + 1) * 0x1p-22f;
  LaneWords farthest{};
  for (int64_t i = 0; i < numel; i += 2 * kLanes) {
    const Halves exact = quotients(load_halves(values + i), i / 2);
    const Halves shifted = {exact.even + kRoundingShift, exact.odd + kRoundingShift};
    const LaneWords even = distance_from_integer(exact.even, shifted.even), odd = distance_from_integer(exact.odd, shifted.odd);
    farthest = larger(farthest, larger(even, odd));
    store_halves<kBits>(codes + i / 8 * kBits, words_of(shifted.even), words_of(shifted.odd));  // the shift's low bits are 0
  }
  return largest_of(farthest) <= bits_of(0.5f - kMargin);
}

template <int kBits>
Lanes clamped_quotients(Lanes values, float scale) {
  constexpr float kLargest = static_cast<float>(CodeFormat<kBits>::kLargest);
  Lanes quotients = values / scale;
  quotients = quotients > kLargest ? Lanes{} + kLargest : quotients;
  return quotients < -kLargest ? Lanes{} - kLargest : quotients;
}

// Stores the codes of a chunk of a block that has codes; with_noise(quotients, index) adds what there is to add.
template <int kBits, class T, class WithNoise>
void store_chunk(const T* values, int64_t numel, float scale, uint8_t* codes, WithNoise with_noise) {
  if (scale >= kSmallestInvertedScale && scale <= kLargestInvertedScale) {
    const float inverse = 1.0f / scale;
    const bool are_sure = store_rounded<kBits>(values, numel, codes, [=](Halves some, int64_t pair) {
      return with_noise(Halves{some.even * inverse, some.odd * inverse}, pair);
    });
    if (are_sure) {
      return;
    }
  }
  store_rounded<kBits>(values, numel, codes, [=](Halves some, int64_t pair) {
    return with_noise(Halves{clamped_quotients<kBits>(some.even, scale), clamped_quotients<kBits>(some.odd, scale)}, pair);
  });
}

// The nearest codes of a block that has codes.
template <int kBits>
void store_nearest(const float* values, int64_t block_numel, float scale, uint8_t* codes) {
  for (int64_t first = 0; first < block_numel; first += kChunkNumel) {
    const int64_t numel = std::min(kChunkNumel, block_numel - first);
    store_chunk<kBits>(values + first, numel, scale, codes + first / 8 * kBits, [](Halves quotients, int64_t) { return quotients; });
  }
}

// The codes of a block that has codes, with the noise of pairs first_pair, first_pair + 1, ...
template <int kBits, class T>
void store_noisy(const T* values, int64_t block_numel, float scale, const Noise& noise, int64_t first_pair, uint8_t* codes) {
  for (int64_t first = 0, numel = 0; first < block_numel; first += numel) {
    const int64_t pairs_to_carry = (int64_t{1} << 32) - static_cast<uint32_t>(first_pair + first / 2);
    numel = std::min({kChunkNumel, block_numel - first, 2 * pairs_to_carry});
    const PairHashes hashes = pair_hashes(noise, first_pair + first / 2);
    const LaneWords counters = kLaneNumbers + hashes.counter, word = LaneWords{} + hashes.word;
    store_chunk<kBits>(values + first, numel, scale, codes + first / 8 * kBits, [=](Halves quotients, int64_t pair) {
      const Halves some = noise_of(hashed(counters + static_cast<uint32_t>(pair), word));
      return Halves{quotients.even + some.even, quotients.odd + some.odd};
    });
  }
}

}  // namespace megatron_zpp::cpu
