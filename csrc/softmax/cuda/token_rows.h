// Distributes tokens to the grid blocks of a grid, and the columns of a token to the threads of its grid block, in chunks of 16 bytes.
//
//     thread   0  1  2 .. 255  0  1 ..
//     chunk    0  1  2 .. 255  256 ..      the last chunk may be short
//
// Which thread has which columns does not depend on where a row starts, and neither do the bits of a sum over them.
#pragma once

#include "../../quantization/cuda/teams.h"
#include "../../quantization/cuda/value_chunks.h"
#include "launchers.h"

namespace megatron_zpp::cuda {

constexpr int kTokenThreads = 256;
constexpr int kTokenWarps = kTokenThreads / kWarpThreads;

// Calls work(first, count, chunk) for the thread's chunks of a row: count values from column `first` on. Others of a chunk are 0.
// kIsWide: whether all chunks start at multiples of 16 bytes.
template <bool kIsWide, class T, class Work>
__device__ __forceinline__ void for_each_chunk(const T* row, int64_t columns, Work work) {
  constexpr int kNumel = PackedChunk<T>::kNumel;
  const int64_t whole = columns / kNumel;
  // Unrolled, so that loads of several chunks are under way at once.
#pragma unroll 4
  for (int64_t index = threadIdx.x; index < whole; index += kTokenThreads) {
    PackedChunk<T> chunk;
    if constexpr (kIsWide) {
      load_wide(row + index * kNumel, chunk);
    } else {
      load_narrow(row + index * kNumel, chunk);
    }
    work(index * kNumel, kNumel, chunk);
  }
  const int count = static_cast<int>(columns - whole * kNumel);
  if (count > 0 && threadIdx.x == whole % kTokenThreads) {
    PackedChunk<T> chunk;
    load_some(row + whole * kNumel, count, chunk);
    work(whole * kNumel, count, chunk);
  }
}

// Calls work(token) for the tokens of a grid block. All threads of a grid block call it equally often.
template <class Work>
__device__ __forceinline__ void for_each_token(int64_t tokens, Work work) {
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    work(token);
  }
}

// Starts kernel(arguments...) for so many tokens.
template <class... Parameters, class... Arguments>
cudaError_t start_tokens(void (*kernel)(Parameters...), int64_t tokens, cudaStream_t stream, Arguments... arguments) {
  return start_grid(kernel, 1, tokens, kTokenThreads, stream, arguments...);
}

}  // namespace megatron_zpp::cuda
