// The codes of one chunk of values: 2, 4 or 8 bytes in a thread's registers, in the byte order of a payload row.
#pragma once

#include "value_chunks.h"

namespace megatron_zpp::cuda {

template <int kBits, int kNumel>
struct CodeChunk {
  static constexpr int kBytes = kNumel * kBits / 8;
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8, "one access per chunk");
  uint32_t words[(kBytes + 3) / 4];
};

template <int kBits, int kNumel>
__device__ __forceinline__ CodeChunk<kBits, kNumel> load_codes(const uint8_t* codes) {
  if constexpr (CodeChunk<kBits, kNumel>::kBytes == 8) {
    const uint2 loaded = *reinterpret_cast<const uint2*>(codes);
    return {{loaded.x, loaded.y}};
  } else if constexpr (CodeChunk<kBits, kNumel>::kBytes == 4) {
    return {{*reinterpret_cast<const uint32_t*>(codes)}};
  } else {
    return {{*reinterpret_cast<const uint16_t*>(codes)}};
  }
}

template <int kBits, int kNumel>
__device__ __forceinline__ void store_codes(const CodeChunk<kBits, kNumel>& chunk, uint8_t* codes) {
  if constexpr (CodeChunk<kBits, kNumel>::kBytes == 8) {
    *reinterpret_cast<uint2*>(codes) = make_uint2(chunk.words[0], chunk.words[1]);
  } else if constexpr (CodeChunk<kBits, kNumel>::kBytes == 4) {
    *reinterpret_cast<uint32_t*>(codes) = chunk.words[0];
  } else {
    *reinterpret_cast<uint16_t*>(codes) = static_cast<uint16_t>(chunk.words[0]);
  }
}

// to_code(value, pair, is_odd): an integer with the code in its low bits; pair: index in the chunk.
template <int kBits, class Chunk, class ToCode>
__device__ __forceinline__ CodeChunk<kBits, Chunk::kNumel> coded(const Chunk& values, ToCode to_code) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  constexpr int kPairsPerWord = 16 / kBits;
  CodeChunk<kBits, Chunk::kNumel> chunk{};
#pragma unroll
  for (int pair = 0; pair < Chunk::kNumel / 2; ++pair) {
    const Pair wide = pair_at(values, pair);
    const uint32_t even = to_code(wide.even, pair, false), odd = to_code(wide.odd, pair, true);
    const uint32_t codes = (even & kMask) | (odd & kMask) << kBits;
    chunk.words[pair / kPairsPerWord] |= codes << (2 * kBits * (pair % kPairsPerWord));
  }
  return chunk;
}

// A code as fp32, without a conversion instruction, which has a quarter of the throughput on GPUs: 2^23 with a code in its low bits is
// 2^23 + code. The sign bit has been flipped before, which adds 2^(kBits - 1) to the two's complement code.
template <int kBits>
__device__ __forceinline__ float code_value(uint32_t flipped_word, int index) {
  constexpr uint32_t kIntegersBits = 0x4b000000u;  // 2^23: floats from there on are 1 apart
  constexpr float kIntegersAndFlip = 8388608.0f + static_cast<float>(1 << (kBits - 1));
  constexpr uint32_t kMask = (1u << kBits) - 1;
  return float_of(kIntegersBits | ((flipped_word >> (kBits * index)) & kMask)) - kIntegersAndFlip;
}

// Calls put(pair, values) for the chunk's pairs of values: codes times scale.
template <int kBits, int kNumel, class Put>
__device__ __forceinline__ void for_each_pair(const CodeChunk<kBits, kNumel>& chunk, float scale, Put put) {
  constexpr uint32_t kSigns = kBits == 8 ? 0x80808080u : 0x88888888u;
  constexpr int kCodesPerWord = 32 / kBits;
#pragma unroll
  for (int pair = 0; pair < kNumel / 2; ++pair) {
    const uint32_t word = chunk.words[2 * pair / kCodesPerWord] ^ kSigns;
    const int even = 2 * pair % kCodesPerWord;
    put(pair, Pair{code_value<kBits>(word, even) * scale, code_value<kBits>(word, even + 1) * scale});
  }
}

}  // namespace megatron_zpp::cuda
