// One thread's 32 values of a block of 256 that a team of 8 neighbouring threads works on, and what the team computes of them.
//
// A thread has 8 chunks of 4 neighbouring values, or 4 chunks of 8, so that it reads and writes 16 bytes at a time. Value number
// chunk * kChunkNumel + i of its share is value (chunk * 8 + thread) * kChunkNumel + i of the block. A bit of every value of the share is a
// word; the words of the team are a bit plane with its bits in another order, and `exchanged` is the way from one order to the other.
#pragma once

#include "../../quantization/cuda/rotate_chunks.h"
#include "../format.h"

namespace megatron_zpp::cuda {

constexpr int kGaussianTeam = 8;
constexpr int kGaussianThreads = 128;  // of a grid block
constexpr int kShareNumel = kGaussianNumel / kGaussianTeam;
static_assert(kShareNumel == kWordBits, "a word has a bit of every value");
static_assert(kPlaneWords == kGaussianTeam, "each thread has one word of a plane");

// In smaller grid blocks than other teams: a multiprocessor has registers for 3 of 128 threads with 168 each, but for one of 256.
template <int kHeld, int kChunkNumel>
struct GaussianTeams : Teams<kGaussianTeam, kHeld, kChunkNumel> {
  static constexpr int kGridBlockThreads = kGaussianThreads;
  static constexpr int kTeamsPerGridBlock = kGridBlockThreads / kGaussianTeam;
};

template <int kChunkNumel_>
struct ValueShare {
  static constexpr int kChunkNumel = kChunkNumel_;
  static constexpr int kChunks = kShareNumel / kChunkNumel;
  using Teams = GaussianTeams<kChunks, kChunkNumel>;
  float values[kShareNumel];
};

// ---- Bits ------------------------------------------------------------------------------------------------------------------------------

// The index in a plane of the word that belongs to a thread.
template <int kChunkNumel>
__device__ __forceinline__ int word_of(int thread) {
  if constexpr (kChunkNumel == 4) {
    return thread;
  } else {
    return 2 * (thread & 3) + (thread >> 2);
  }
}

// The low one of every two neighbouring groups of so many bits.
template <int kBits>
constexpr uint32_t kLowGroups = kBits == 4 ? 0x0f0f0f0fu : kBits == 8 ? 0x00ff00ffu : 0x0000ffffu;

// The word of a thread's share, from the thread's word of a plane; and the other way round, with the same exchanges. It transposes a
// matrix with a row for each thread and a column for each chunk, by blocks of 1, 2 and 4 rows.
template <int kChunkNumel>
__device__ __forceinline__ uint32_t exchanged(uint32_t word, int thread) {
  static_assert(kChunkNumel == 4 || kChunkNumel == 8, "8 or 4 threads exchange chunks");
  const auto exchange = [&](auto shift, int threads_apart) {
    constexpr int kShift = decltype(shift)::value;
    constexpr uint32_t kLow = kLowGroups<kShift>;
    const uint32_t other = __shfl_xor_sync(kWholeWarp, word, threads_apart);
    word = (thread & threads_apart) == 0 ? (word & kLow) | (other & kLow) << kShift : (word & ~kLow) | (other & ~kLow) >> kShift;
  };
  if constexpr (kChunkNumel == 4) {
    exchange(std::integral_constant<int, 4>(), 1);
    exchange(std::integral_constant<int, 8>(), 2);
    exchange(std::integral_constant<int, 16>(), 4);
  } else {
    exchange(std::integral_constant<int, 8>(), 1);
    exchange(std::integral_constant<int, 16>(), 2);
  }
  return word;
}

// The random signs of the share in one round. All threads of a warp call it together.
template <int kChunkNumel>
__device__ __forceinline__ uint32_t signs_of_share(const Noise& noise, int round, int thread) {
  const uint32_t word = pair_hashes(noise, round * kPlaneWords).at(word_of<kChunkNumel>(thread));
  return exchanged<kChunkNumel>(word, thread);
}

// Changes the sign of the values whose bit is 1.
template <class Values>
__device__ __forceinline__ void flip(Values& share, uint32_t signs) {
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) {
    share.values[i] = float_of(bits_of(share.values[i]) ^ ((signs << (kWordBits - 1 - i)) & kSignBit));
  }
}

// ---- Transform and sums ----------------------------------------------------------------------------------------------------------------

// Stages that combine values of one thread, whose numbers in the share are kFirst, 2 * kFirst, ... apart, below kLast.
template <int kFirst, int kLast, class Values>
__device__ __forceinline__ void stages_of_thread(Values& share) {
#pragma unroll
  for (int distance = kFirst; distance < kLast; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kShareNumel; ++i) {
      if ((i & distance) == 0) {
        const float low = share.values[i], high = share.values[i + distance];
        share.values[i] = low + high;
        share.values[i + distance] = low - high;
      }
    }
  }
}

// The Hadamard transform of the block: stages at distances 1, 2, 4, ... 128. All threads of a warp call it together.
template <class Values>
__device__ __forceinline__ void hadamard(Values& share, int thread) {
  stages_of_thread<1, Values::kChunkNumel>(share);
#pragma unroll
  for (int threads_apart = 1; threads_apart < kGaussianTeam; threads_apart *= 2) {
#pragma unroll
    for (int i = 0; i < kShareNumel; ++i) {
      share.values[i] = sum_or_difference(share.values[i], thread, threads_apart);
    }
  }
  stages_of_thread<Values::kChunkNumel, kShareNumel>(share);
}

// Adds the upper half of the first 2 * kHalf terms to their lower half, then halves these, until kLast terms are left.
template <int kHalf, int kLast>
__device__ __forceinline__ void fold(float (&terms)[kShareNumel / 2]) {
  if constexpr (kHalf >= kLast) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      terms[i] += terms[i + kHalf];
    }
    fold<kHalf / 2, kLast>(terms);
  }
}

// The sum of term(i) over the values of the block: the upper half is added to the lower half, eight times over.
template <class Values, class Term>
__device__ __forceinline__ float block_sum(Term term) {
  constexpr int kChunkNumel = Values::kChunkNumel;
  float terms[kShareNumel / 2];
#pragma unroll
  for (int i = 0; i < kShareNumel / 2; ++i) {
    const float low = term(i);
    terms[i] = low + term(i + kShareNumel / 2);
  }
  fold<kShareNumel / 4, kChunkNumel>(terms);
#pragma unroll
  for (int threads_apart = kGaussianTeam / 2; threads_apart > 0; threads_apart /= 2) {
#pragma unroll
    for (int i = 0; i < kChunkNumel; ++i) {
      terms[i] += float_of(__shfl_xor_sync(kWholeWarp, bits_of(terms[i]), threads_apart));
    }
  }
  fold<kChunkNumel / 2, 1>(terms);
  return terms[0];
}

}  // namespace megatron_zpp::cuda
