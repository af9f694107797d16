// Computes codes of fp32 values with one multiplication each, if that is certain to give the same codes as a division.
//
// All numbers here are below Q + 1, a power of two, so half an ulp is at most h = (Q + 1) * 2^-25. With i = fl(1 / s), x * i is within
// |x / s| * 2^-24 < 2h of x / s, and fl(x * i) within h more. The result of the division, clamped to -Q to Q, is within 2h of x / s, since
// |x / s| is at most Q * (1 + 2^-24). Adding noise rounds both by up to h. So the two differ by at most 7h. If the product is 8h or more
// from every half-integer, the quotient is on the same side, and both round to the same code. Few values are nearer; their chunk is
// divided.
#pragma once

#include <algorithm>

#include "../noise.h"
#include "lanes.h"

namespace megatron_zpp::cpu {

// Between these scales 1 / s is normal, and so is x / s for |x| of at most s * Q, or it is so small that the code is that of 0 either way.
constexpr float kSmallestInvertedScale = 0x1p-100f;
constexpr float kLargestInvertedScale = 0x1p+100f;

constexpr int64_t kChunkNumel = 256;  // with 8 bits, one value in 2^14 is uncertain, so one chunk in 64 is divided

// A quotient whose distance from its integer is at most this is certain: the bits of 1/2 - 8h.
template <int kBits>
constexpr uint32_t kFarthestSure = 0x3f000000u - (static_cast<uint32_t>(CodeFormat<kBits>::kLargest + 1) << 3);

// Noise for kLanes pairs of values.
inline Halves noise_of(LaneWords hashes) {
  constexpr uint32_t kOneAndHalfStep = 0x3f800040u;
  const LaneWords even = ((hashes << 7) & 0x007fff80u) | kOneAndHalfStep, odd = ((hashes >> 9) & 0x007fff80u) | kOneAndHalfStep;
  return {floats_of(even) - 1.5f, floats_of(odd) - 1.5f};
}

// Rounds lanes to integers, and records the largest distance of a value from its integer.
template <int kBits>
class Rounding {
 public:
  // Words with the codes in their low bits; the low bits of the shift are 0.
  LaneWords operator()(Lanes quotients) {
    const Lanes shifted = quotients + kRoundingShift;
    farthest_ = larger(farthest_, words_of(quotients - (shifted - kRoundingShift)) & 0x7fffffffu);
    return words_of(shifted);
  }

  // Whether all values were so far from half-integers that product and quotient round to the same code.
  bool was_sure() const { return largest_of(farthest_) <= kFarthestSure<kBits>; }

 private:
  LaneWords farthest_{};
};

template <int kBits, class T, class Quotients>
bool store_rounded(const T* values, int64_t numel, const PairHashes& hashes, uint8_t* codes, Quotients quotients) {
  Rounding<kBits> rounding;
  const LaneWords counters = kLaneNumbers + hashes.counter, word = LaneWords{} + hashes.word;
  for (int64_t i = 0; i < numel; i += 2 * kLanes) {
    const Halves some = load_halves(values + i);
    const Halves noise = noise_of(hashed(counters + static_cast<uint32_t>(i / 2), word));
    const LaneWords even = rounding(quotients(some.even) + noise.even);
    store_halves<kBits>(codes + i / 8 * kBits, even, rounding(quotients(some.odd) + noise.odd));
  }
  return rounding.was_sure();
}

template <int kBits>
Lanes clamped_quotients(Lanes values, float scale) {
  constexpr float kLargest = static_cast<float>(CodeFormat<kBits>::kLargest);
  Lanes quotients = values / scale;
  quotients = quotients > kLargest ? Lanes{} + kLargest : quotients;
  return quotients < -kLargest ? Lanes{} - kLargest : quotients;
}

inline bool is_invertible(float scale) { return scale >= kSmallestInvertedScale && scale <= kLargestInvertedScale; }

// Stores the codes of a chunk by products if they are certain, else by quotients.
// store(quotients) stores the codes of a chunk and returns whether they are certain.
template <int kBits, class Store>
void store_surely(float scale, Store store) {
  if (is_invertible(scale)) {
    const float inverse = 1.0f / scale;
    if (store([inverse](Lanes values) { return values * inverse; })) {
      return;
    }
  }
  store([scale](Lanes values) { return clamped_quotients<kBits>(values, scale); });
}

// The distance of a float from the integer to which the shift rounded it, as bits.
inline uint32_t distance_from_integer(float value, float shifted) {
  return ValueFormat<float>::magnitude(value - (shifted - kRoundingShift));
}

inline uint32_t larger(uint32_t left, uint32_t right) { return left > right ? left : right; }

// to_code: fp32 value to an integer with the code in its low bits.
template <int kBits, class ToCode>
void store_codes(const float* __restrict values, int64_t numel, uint8_t* __restrict codes, ToCode to_code) {
  if constexpr (kBits == 8) {
    for (int64_t i = 0; i < numel; ++i) {
      codes[i] = static_cast<uint8_t>(to_code(values[i]));
    }
  } else {
    for (int64_t pair = 0; pair < numel / 2; ++pair) {
      store_pair<kBits>(codes, pair, to_code(values[2 * pair]), to_code(values[2 * pair + 1]));
    }
  }
}

// Stores the nearest codes of a chunk and returns whether they are certain. A separate function with a constant number of values, because
// compilers vectorise that best.
template <int kBits, int64_t kNumel>
[[gnu::noinline]] bool store_nearest_surely(const float* __restrict values, float inverse, uint8_t* __restrict codes) {
  uint32_t farthest = 0;
  if constexpr (kBits == 8) {
    for (int64_t i = 0; i < kNumel; ++i) {
      const float quotient = values[i] * inverse, shifted = quotient + kRoundingShift;
      farthest = larger(farthest, distance_from_integer(quotient, shifted));
      codes[i] = static_cast<uint8_t>(bits_of(shifted));
    }
  } else {
    for (int64_t pair = 0; pair < kNumel / 2; ++pair) {
      const float even = values[2 * pair] * inverse, odd = values[2 * pair + 1] * inverse;
      const float shifted_even = even + kRoundingShift, shifted_odd = odd + kRoundingShift;
      farthest = larger(farthest, larger(distance_from_integer(even, shifted_even), distance_from_integer(odd, shifted_odd)));
      store_pair<kBits>(codes, pair, bits_of(shifted_even), bits_of(shifted_odd));
    }
  }
  return farthest <= kFarthestSure<kBits>;
}

template <int kBits, int64_t kNumel>
void store_nearest_chunk(const float* values, float scale, float inverse, uint8_t* codes) {
  if (!is_invertible(scale) || !store_nearest_surely<kBits, kNumel>(values, inverse, codes)) {
    store_codes<kBits>(values, kNumel, codes, [scale](float value) { return code_of<kBits>(value, scale); });
  }
}

// Stores the nearest codes of a block that has codes.
template <int kBits>
void store_nearest(const float* values, int64_t block_numel, float scale, uint8_t* codes) {
  const float inverse = 1.0f / scale;
  int64_t first = 0;
  for (; first + kChunkNumel <= block_numel; first += kChunkNumel) {
    store_nearest_chunk<kBits, kChunkNumel>(values + first, scale, inverse, codes + first / 8 * kBits);
  }
  for (; first < block_numel; first += kBlockNumelMultiple) {
    store_nearest_chunk<kBits, kBlockNumelMultiple>(values + first, scale, inverse, codes + first / 8 * kBits);
  }
}

// Stores the codes of a block that has codes, with the noise of pairs first_pair, first_pair + 1, ...
template <int kBits, class T>
void store_noisy(const T* values, int64_t block_numel, float scale, const Noise& noise, int64_t first_pair, uint8_t* codes) {
  for (int64_t first = 0, numel = 0; first < block_numel; first += numel) {
    const int64_t pairs_to_carry = (int64_t{1} << 32) - static_cast<uint32_t>(first_pair + first / 2);
    numel = std::min({kChunkNumel, block_numel - first, 2 * pairs_to_carry});
    const PairHashes hashes = pair_hashes(noise, first_pair + first / 2);
    store_surely<kBits>(scale, [&](auto quotients) {
      return store_rounded<kBits>(values + first, numel, hashes, codes + first / 8 * kBits, quotients);
    });
  }
}

}  // namespace megatron_zpp::cpu
