// Noise for stochastic rounding: a function of a key and of a value's index, so that every thread and every device draws the same.
//
// The code of a quotient q is rint(q + w) with w an odd multiple of 2^-17 between -1/2 and 1/2, each equally likely: it is the integer
// below q or the one above, with q as its mean. One hash serves two neighbouring values.
#pragma once

#include "block_format.h"

namespace megatron_zpp {

// One of 2^64 streams of noise, or none.
struct Noise {
  bool is_on;
  uint32_t first_word;
  uint32_t second_word;
};

constexpr Noise kNoNoise = {false, 0, 0};

// Keys next to each other start far apart: the step of SplitMix64 (Steele, Lea, Flood 2014), which is a bijection.
inline Noise noise_of(uint64_t key) {
  uint64_t mixed = key + 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  mixed ^= mixed >> 31;
  return {true, static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)};
}

// triple32 of C. Wellons' hash-prospector, joined by a second word behind its first round.
ZPP_HOST_DEVICE uint32_t hashed(uint32_t counter, uint32_t word) {
  counter ^= counter >> 17;
  counter *= 0xed5ad4bbu;
  counter ^= counter >> 11;
  counter ^= word;
  counter *= 0xac4c1b51u;
  counter ^= counter >> 15;
  counter *= 0x31848babu;
  counter ^= counter >> 14;
  return counter;
}

// The hash for values 2 * pair and 2 * pair + 1, counted over all slices.
ZPP_HOST_DEVICE uint32_t pair_hash(const Noise& noise, int64_t pair) {
  return hashed(static_cast<uint32_t>(pair) + noise.first_word, static_cast<uint32_t>(pair >> 32) + noise.second_word);
}

// The noise in the hash's 16 low or high bits k: (2k + 1) / 2^17 - 1/2. Floats in [1, 2) are 2^-23 apart; nothing here rounds.
ZPP_HOST_DEVICE float even_noise(uint32_t hash) { return float_of(((hash << 7) & 0x007fff80u) | 0x3f800040u) - 1.5f; }
ZPP_HOST_DEVICE float odd_noise(uint32_t hash) { return float_of(((hash >> 9) & 0x007fff80u) | 0x3f800040u) - 1.5f; }

// The code of a value in a block that has codes. The sum stays below Q + 1/2: Q and the noise add up without rounding.
template <int kBits>
ZPP_HOST_DEVICE uint32_t noisy_code_of(float value, float scale, float noise) {
  return rounded(clamped_quotient<kBits>(value, scale) + noise);
}

}  // namespace megatron_zpp
