// Computes the mean over members of a thread's part of a block.
#pragma once

#include "code_chunks.h"
#include "teams.h"

namespace megatron_zpp::cuda {

// Division by the number of members. For a power of two, multiplying by the inverse rounds the same number.
struct Divisor {
  float members;
  float inverse;  // 0 if it is not exact

  __device__ __forceinline__ float divided(float total) const { return inverse != 0.0f ? total * inverse : total / members; }
};

inline Divisor divisor_of(int64_t members) {
  const auto count = static_cast<float>(members);
  return {count, (members & (members - 1)) == 0 ? 1.0f / count : 0.0f};
}

template <class Teams, int kBits>
struct HeldCodes {
  using Codes = CodeChunk<kBits, Teams::kChunkNumel>;
  Codes chunks[Teams::kHeld];

  __device__ __forceinline__ void load(const uint8_t* codes, const Share& share, const Piece& piece) {
    const uint8_t* source = codes + piece.first * Codes::kBytes;
#pragma unroll
    for (int i = 0; i < Teams::kHeld; ++i) {
      chunks[i] = Codes{};
    }
    for_each_held<Teams>(share, piece, [&](int i, int chunk) {
      chunks[i] = load_codes<kBits, Teams::kChunkNumel>(source + chunk * Codes::kBytes);
    });
  }
};

// Fills totals with the mean over members 0, 1, ... of the team's block. While one member is added, the codes of the next are being loaded.
template <class Teams, int kBits>
__device__ __forceinline__ void load_mean(
    const PayloadRows<const uint8_t>& payloads,
    int64_t slice,
    int64_t block,
    int64_t block_bytes,
    const Share& share,
    const Piece& piece,
    const Divisor& divisor,
    float (&totals)[Teams::kHeld][Teams::kChunkNumel]) {
  const auto scale_of = [&](int64_t member) { return share.chunks > 0 ? payloads.scales(member, slice)[block] : 0.0f; };
  const auto codes_of = [&](int64_t member) { return payloads.codes(member, slice) + block * block_bytes; };
  HeldCodes<Teams, kBits> next;
  next.load(codes_of(0), share, piece);
  float next_scale = scale_of(0);
#pragma unroll
  for (int i = 0; i < Teams::kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < Teams::kChunkNumel; ++j) {
      totals[i][j] = -0.0f;  // -0 + x is x, also for x = -0
    }
  }
  for (int64_t member = 0; member < payloads.members; ++member) {
    const HeldCodes<Teams, kBits> held = next;
    const float scale = next_scale;
    if (member + 1 < payloads.members) {
      next.load(codes_of(member + 1), share, piece);
      next_scale = scale_of(member + 1);
    }
#pragma unroll
    for (int i = 0; i < Teams::kHeld; ++i) {
      for_each_pair(held.chunks[i], scale, [&](int pair, Pair values) {
        totals[i][2 * pair] += values.even;
        totals[i][2 * pair + 1] += values.odd;
      });
    }
  }
#pragma unroll
  for (int i = 0; i < Teams::kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < Teams::kChunkNumel; ++j) {
      totals[i][j] = divisor.divided(totals[i][j]);
    }
  }
}

}  // namespace megatron_zpp::cuda
