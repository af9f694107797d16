// Applies the Hadamard transform to groups of 32 neighbouring values. 4 or 8 neighbouring threads of a team hold a group, in the same
// registers.
//
// With 8 values per thread, the stages at distances 1, 2 and 4 combine values of one thread, and those at 8 and 16 values of threads that
// are 1 and 2 apart. With 4 values per thread, there are 2 stages within a thread, then 3 between threads that are 1, 2 and 4 apart. A team
// has at least as many threads as a group and begins at a multiple of that number. All threads of a warp rotate together: a chunk beyond
// the end is zeros, and so is the rest of its group.
#pragma once

#include "teams.h"
#include "value_chunks.h"

namespace megatron_zpp::cuda {

constexpr int kRotatedNumel = 32;

// For the lower one of two threads `threads_apart`: its own value plus the other's; for the upper one: the other's minus its own.
__device__ __forceinline__ float sum_or_difference(float own, int thread, int threads_apart) {
  const float other = float_of(__shfl_xor_sync(kWholeWarp, bits_of(own), threads_apart));
  const uint32_t sign = (thread & threads_apart) != 0 ? 0x80000000u : 0u;
  return other + float_of(bits_of(own) ^ sign);
}

template <int kNumel>
__device__ __forceinline__ void rotate(float (&values)[kNumel], int thread) {
  static_assert(kNumel == 4 || kNumel == 8, "4 or 8 threads share a group");
#pragma unroll
  for (int distance = 1; distance < kNumel; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      if ((i & distance) == 0) {
        const float low = values[i], high = values[i + distance];
        values[i] = low + high;
        values[i + distance] = low - high;
      }
    }
  }
#pragma unroll
  for (int threads_apart = 1; threads_apart < kRotatedNumel / kNumel; threads_apart *= 2) {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      values[i] = sum_or_difference(values[i], thread, threads_apart);
    }
  }
}

}  // namespace megatron_zpp::cuda
