// Distributes the blocks of all slices to the threads of a grid.
//
// A team of kTeamThreads neighbouring threads works on one block. Each thread holds up to kHeld chunks of kChunkNumel neighbouring values,
// so that a team reads whole lines of memory, with all its loads in flight at once. A team of 8 threads with 3 chunks each:
//
//     thread      0  1  2  3  4  5  6  7  0  1  2  3  4  5  6  7  0  1  2  3  4  5  6  7
//     chunk       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23
//
// A block with more chunks than its team can hold is processed in pieces. A "grid block" is CUDA's thread block; "block" alone means
// values with a common scale. The teams of one grid block work on neighbouring blocks, the rows of the grid on different slices.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace megatron_zpp::cuda {

constexpr int kWarpThreads = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kSmallGridBlockThreads = 256;
constexpr int kLargestTeamThreads = 512;         // with twice as many, a thread could not hold as much without spilling registers
constexpr int64_t kMostGridBlocks = 2147483647;  // in a row of the grid
constexpr int64_t kMostGridRows = 65535;

template <int kTeamThreads_, int kHeld_, int kChunkNumel_>
struct Teams {
  static constexpr int kTeamThreads = kTeamThreads_;  // a power of two
  static constexpr int kHeld = kHeld_;
  static constexpr int kChunkNumel = kChunkNumel_;
  static constexpr int kGridBlockThreads = kTeamThreads > kWarpThreads ? kTeamThreads : kSmallGridBlockThreads;
  static constexpr int kTeamsPerGridBlock = kGridBlockThreads / kTeamThreads;
  static constexpr int kPieceChunks = kTeamThreads * kHeld;
  static constexpr bool kHoldsWholeBlocks = kTeamThreads < kLargestTeamThreads;
  // Grid blocks per multiprocessor; 0: the compiler decides. For the largest teams it would spill registers to have more than one.
  static constexpr int kLeastGridBlocks = kHoldsWholeBlocks ? 0 : 1;
};

// One thread's part of a block: chunks `thread`, `thread + kTeamThreads`, ... of it.
struct Share {
  int thread;      // within the team
  int64_t chunks;  // of the block; 0 if the team has no block and only takes part in the other teams' synchronisation
};

// The part of a block that a team holds at a time: `chunks` chunks from `first` on.
struct Piece {
  int64_t first;
  int chunks;
};

template <class Teams>
__device__ __forceinline__ int64_t pieces_of(const Share& share) {
  return Teams::kHoldsWholeBlocks ? 1 : (share.chunks + Teams::kPieceChunks - 1) / Teams::kPieceChunks;
}

template <class Teams>
__device__ __forceinline__ Piece piece_at(const Share& share, int64_t index) {
  if constexpr (Teams::kHoldsWholeBlocks) {
    return {0, static_cast<int>(share.chunks)};
  } else {
    const int64_t first = index * Teams::kPieceChunks;
    const int64_t rest = share.chunks - first;
    return {first, static_cast<int>(rest < Teams::kPieceChunks ? rest : Teams::kPieceChunks)};
  }
}

// Calls work(i, chunk) for the thread's chunks of a piece: the i-th chunk that it holds is number `chunk` of the piece.
template <class Teams, class Work>
__device__ __forceinline__ void for_each_held(const Share& share, const Piece& piece, Work work) {
#pragma unroll
  for (int i = 0; i < Teams::kHeld; ++i) {
    const int chunk = i * Teams::kTeamThreads + share.thread;
    if (chunk < piece.chunks) {
      work(i, chunk);
    }
  }
}

// Calls work(slice, block, share) for the blocks of the thread's team. All threads of a grid block call it equally often.
template <class Teams, class Work>
__device__ __forceinline__ void for_each_block(int64_t slices, int64_t blocks, int64_t block_numel, Work work) {
  const int thread = static_cast<int>(threadIdx.x) % Teams::kTeamThreads;
  const int team = static_cast<int>(threadIdx.x) / Teams::kTeamThreads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * Teams::kTeamsPerGridBlock;
  for (int64_t slice = blockIdx.y; slice < slices; slice += gridDim.y) {
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * Teams::kTeamsPerGridBlock; first < blocks; first += step) {
      const int64_t block = first + team;
      work(slice, block, Share{thread, block < blocks ? block_numel / Teams::kChunkNumel : 0});
    }
  }
}

template <int kThreads>
__device__ __forceinline__ uint32_t max_among(uint32_t value) {
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kWholeWarp, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

// The largest `value` among the threads of the team. All threads of the grid block must call it together.
template <class Teams>
__device__ __forceinline__ uint32_t team_max(uint32_t value) {
  if constexpr (Teams::kTeamThreads <= kWarpThreads) {
    return max_among<Teams::kTeamThreads>(value);
  } else {
    constexpr int kWarps = Teams::kTeamThreads / kWarpThreads;
    __shared__ uint32_t of_warps[kWarps];
    const uint32_t of_warp = max_among<kWarpThreads>(value);
    __syncthreads();  // until all threads have read the entries of the block before
    if (threadIdx.x % kWarpThreads == 0) {
      of_warps[threadIdx.x / kWarpThreads] = of_warp;
    }
    __syncthreads();
    return max_among<kWarps>(of_warps[threadIdx.x % kWarps]);
  }
}

// ---- On the host -----------------------------------------------------------------------------------------------------------------------

// Calls launch with the Teams for this size of blocks. A team of 8 threads reads 8 x 16 bytes, one line of memory. Larger blocks get
// larger teams, so that no thread holds more than kHeldNumel values.
template <int kChunkNumel, class Launch>
cudaError_t dispatch_teams(int64_t block_numel, Launch launch) {
  constexpr int kHeldNumel = 32;
  constexpr int kHeld = kHeldNumel / kChunkNumel;
  if (block_numel <= kHeldNumel) {
    return launch(Teams<kHeldNumel / kChunkNumel, 1, kChunkNumel>());
  }
  if (block_numel <= 8 * kHeldNumel) {
    return launch(Teams<8, kHeld, kChunkNumel>());
  }
  if (block_numel <= kWarpThreads * kHeldNumel) {
    return launch(Teams<kWarpThreads, kHeld, kChunkNumel>());
  }
  if (block_numel <= 256 * kHeldNumel) {
    return launch(Teams<256, kHeld, kChunkNumel>());
  }
  return launch(Teams<kLargestTeamThreads, kHeld, kChunkNumel>());
}

// Starts kernel(arguments...) on so many rows of grid blocks, or as many as a grid can have; does nothing if there are none.
template <class... Parameters, class... Arguments>
cudaError_t start_grid(
    void (*kernel)(Parameters...), int64_t rows, int64_t grid_blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  if (rows == 0 || grid_blocks == 0) {
    return cudaSuccess;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(grid_blocks, kMostGridBlocks)), static_cast<unsigned>(std::min(rows, kMostGridRows)));
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Starts kernel(arguments...) for `slices` rows of `blocks` blocks.
template <class Teams, class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), int64_t slices, int64_t blocks, cudaStream_t stream, Arguments... arguments) {
  const int64_t grid_blocks = (blocks + Teams::kTeamsPerGridBlock - 1) / Teams::kTeamsPerGridBlock;
  return start_grid(kernel, slices, grid_blocks, Teams::kGridBlockThreads, stream, arguments...);
}

}  // namespace megatron_zpp::cuda
