// Computes the scale and the codes of the block that a team holds.
#pragma once

#include <type_traits>

#include "../exact_reciprocal.h"
#include "../noise.h"
#include "code_chunks.h"
#include "teams.h"

namespace megatron_zpp::cuda {

// What decides a block's noise. The index of its first pair is computed where it is needed, so that it does not occupy registers.
struct BlockNoise {
  const Noise& noise;
  int64_t block;  // counted over all slices
  int64_t block_numel;
};

// to_codes(chunk, index): the codes of a chunk of values; index: that of the chunk in the block.
template <class Teams, int kBits, class Chunk, class ToCodes>
__device__ __forceinline__ void store_held(
    const Share& share, const Piece& piece, const Chunk (&held)[Teams::kHeld], uint8_t* codes, ToCodes to_codes) {
  constexpr int kChunkBytes = CodeChunk<kBits, Chunk::kNumel>::kBytes;
  uint8_t* target = codes + piece.first * kChunkBytes;
  for_each_held<Teams>(share, piece, [&](int i, int chunk) {
    store_codes<kBits, Chunk::kNumel>(to_codes(held[i], piece.first + chunk), target + chunk * kChunkBytes);
  });
}

// The codes of a chunk: of fp32 values by products where all of these are sure, else by divisions, which take longer, and of zeros much longer.
// 16-bit values are divided: those with noise, and of blocks without a factor. More registers would slow the blocks that have one.
// noise_of(pair, is_odd): what is added to a quotient.
template <int kBits, class Chunk, class NoiseOf>
__device__ __forceinline__ CodeChunk<kBits, Chunk::kNumel> codes_of(const Chunk& values, float scale, NoiseOf noise_of) {
  if constexpr (std::is_same_v<typename Chunk::Value, float>) {
    const float reciprocal = near_reciprocal(scale);
    float farthest = 0.0f;
    const auto chunk = coded<kBits>(values, [&](float value, int pair, bool is_odd) {
      const float quotient = value * reciprocal + noise_of(pair, is_odd);
      const float shifted = quotient + kRoundingShift;
      farthest = fmaxf(farthest, fabsf(quotient - (shifted - kRoundingShift)));
      return bits_of(shifted) - kRoundingShiftBits;
    });
    if (reciprocal != 0.0f && farthest <= kSureDistance<kBits>) {
      return chunk;
    }
  }
  return coded<kBits>(values, [&](float value, int pair, bool is_odd) {
    return rounded(clamped_quotient<kBits>(value, scale) + noise_of(pair, is_odd));
  });
}

// Stores the codes of the chunks held, under the block's scale; factor: from exact_reciprocal.
template <class Teams, int kBits, class Chunk>
__device__ __forceinline__ void store_scaled(
    const Share& share,
    const Piece& piece,
    const Chunk (&held)[Teams::kHeld],
    float scale,
    float factor,
    const BlockNoise& noise,
    uint8_t* codes) {
  using Codes = CodeChunk<kBits, Chunk::kNumel>;
  if (!has_codes(scale)) {
    store_held<Teams, kBits>(share, piece, held, codes, [](const Chunk&, int64_t) { return Codes{}; });
  } else if (noise.noise.is_on) {
    const int64_t first_pair = noise.block * (noise.block_numel / 2);
    store_held<Teams, kBits>(share, piece, held, codes, [&](const Chunk& values, int64_t index) {
      const PairHashes hashes = pair_hashes(noise.noise, first_pair + index * (Chunk::kNumel / 2));
      return codes_of<kBits>(values, scale, [&](int pair, bool is_odd) { return noise_in(hashes.at(pair), is_odd); });
    });
  } else if (factor != 0.0f) {
    store_held<Teams, kBits>(share, piece, held, codes, [factor](const Chunk& values, int64_t) {
      return coded<kBits>(values, [factor](float value, int, bool) { return rounded(value * factor); });
    });
  } else {
    store_held<Teams, kBits>(share, piece, held, codes, [&](const Chunk& values, int64_t) {
      return codes_of<kBits>(values, scale, [](int, bool) { return -0.0f; });  // -0 + x is x, also for x = -0
    });
  }
}

template <class T, int kBits>
__device__ __forceinline__ float factor_of(typename ValueFormat<T>::Magnitude largest, float scale) {
  if constexpr (ValueFormat<T>::kSignificandBits <= 11) {
    return exact_reciprocal<T, kBits>(largest, scale);
  } else {
    return 0.0f;
  }
}

// Encodes the team's block. load(piece, held) fills the thread's part of a piece; chunks beyond the end are zeros.
// It is called once per piece, and once more per piece if the team cannot hold the whole block.
template <class Teams, int kBits, class Chunk, class Load>
__device__ __forceinline__ void encode_block(const Share& share, Load load, const BlockNoise& noise, uint8_t* codes, float* scale_target) {
  using T = typename Chunk::Value;
  Chunk held[Teams::kHeld];
  const int64_t pieces = pieces_of<Teams>(share);
  uint32_t largest = 0;
  for (int64_t index = 0; index < pieces; ++index) {
    load(piece_at<Teams>(share, index), held);
#pragma unroll
    for (int i = 0; i < Teams::kHeld; ++i) {
      largest = larger(largest, largest_magnitude(held[i]));
    }
  }
  const auto magnitude = static_cast<typename ValueFormat<T>::Magnitude>(team_max<Teams>(largest));
  const float scale = block_scale<T, kBits>(magnitude);
  const float factor = factor_of<T, kBits>(magnitude, scale);
  if (share.thread == 0 && share.chunks > 0) {
    *scale_target = scale;
  }
  for (int64_t index = 0; index < pieces; ++index) {
    const Piece piece = piece_at<Teams>(share, index);
    if (pieces > 1) {
      load(piece, held);
    }
    store_scaled<Teams, kBits>(share, piece, held, scale, factor, noise, codes);
  }
}

}  // namespace megatron_zpp::cuda
