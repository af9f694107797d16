// Noise for stochastic rounding: a function of a key and of a value's index, so it does not depend on the thread or the device.
//
// The code of a quotient q is rint(q + w), where w is an odd multiple of 2^-17 between -1/2 and 1/2, all equally likely. The code is the
// integer below q or the one above, and its mean is q. One hash gives the noise of two neighbouring values. A clamped quotient plus noise
// is at most Q + 1/2 - 2^-17 without rounding, so codes are within -Q to Q.
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

// Neighbouring keys start far apart. The step of SplitMix64 (Steele, Lea, Flood 2014), a bijection.
inline Noise noise_of(uint64_t key) {
  uint64_t mixed = key + 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  mixed ^= mixed >> 31;
  return {true, static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)};
}

// triple32 of C. Wellons' hash-prospector, with a second word mixed in after its first round. Word: uint32_t, or a vector of them.
template <class Word>
ZPP_HOST_DEVICE Word hashed(Word counter, Word word) {
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

// The hashes of pairs first, first + 1, ... of neighbouring values, counted over all slices, up to the next multiple of 2^32.
struct PairHashes {
  uint32_t counter;
  uint32_t word;

  ZPP_HOST_DEVICE uint32_t at(int64_t i) const { return hashed(counter + static_cast<uint32_t>(i), word); }
};

ZPP_HOST_DEVICE PairHashes pair_hashes(const Noise& noise, int64_t first) {
  return {static_cast<uint32_t>(first) + noise.first_word, static_cast<uint32_t>(first >> 32) + noise.second_word};
}

// The noise (2k + 1) / 2^17 - 1/2, where k is the 16 low or high bits of the hash. Floats in [1, 2) are 2^-23 apart, so nothing rounds.
ZPP_HOST_DEVICE float noise_in(uint32_t hash, bool is_odd) {
  return float_of(((is_odd ? hash >> 9 : hash << 7) & 0x007fff80u) | 0x3f800040u) - 1.5f;
}

}  // namespace megatron_zpp
