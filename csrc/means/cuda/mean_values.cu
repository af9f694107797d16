// mean_values on GPUs: every thread takes 16 bytes from each member. The rows of the grid work on different slices.
#include <algorithm>

#include "../../quantization/cuda/mean_of_members.h"
#include "../../quantization/cuda/value_chunks.h"
#include "launcher.h"

namespace megatron_zpp::cuda {
namespace {

constexpr int kMeanThreads = 256;

// As many members' values as there are means in 16 bytes. Neighbouring threads have neighbouring chunks, so that a warp's accesses fill
// the sectors that they touch, those to fp32 means of 16-bit members as well.
template <class T, class Stored>
using MemberChunk = PackedChunk<T, std::min(kFullChunkNumel<T>, kFullChunkNumel<Stored>)>;

// Which of the values from `first` on a chunk has: all of them, by one wide access, or the first `count`.
struct Extent {
  int64_t first;
  int64_t count;
  bool is_wide;
};

template <class Chunk, class T>
__device__ __forceinline__ Chunk loaded(const T* row, const Extent& extent) {
  Chunk chunk;
  extent.is_wide ? load_wide(row + extent.first, chunk) : load_some(row + extent.first, extent.count, chunk);
  return chunk;
}

template <class T, int kNumel>
__device__ __forceinline__ void store(const PackedChunk<T, kNumel>& chunk, const Extent& extent, T* row) {
  extent.is_wide ? store_wide(chunk, row + extent.first) : store_some(chunk, extent.count, row + extent.first);
}

// Fills totals with the means over members 0, 1, ... of the chunks. While one member is added, the values of the next are being loaded.
template <class Chunk, class T, int kChunks>
__device__ __forceinline__ void load_means(
    const MemberRows<T>& members,
    int64_t slice,
    const Extent (&extents)[kChunks],
    const Divisor& divisor,
    float (&totals)[kChunks][Chunk::kNumel]) {
  Chunk next[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    next[i] = loaded<Chunk>(members.row(0, slice), extents[i]);
#pragma unroll
    for (float& total : totals[i]) {
      total = -0.0f;  // -0 + x is x, also for x = -0
    }
  }
  for (int64_t member = 0; member < members.members; ++member) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const Chunk held = next[i];
      if (member + 1 < members.members) {
        next[i] = loaded<Chunk>(members.row(member + 1, slice), extents[i]);
      }
#pragma unroll
      for (int pair = 0; pair < Chunk::kNumel / 2; ++pair) {
        const Pair values = pair_at(held, pair);
        totals[i][2 * pair] += values.even;
        totals[i][2 * pair + 1] += values.odd;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (float& total : totals[i]) {
      total = divisor.divided(total);
    }
  }
}

// Adds the means to the chunk, or sets it to them.
template <int kNumel>
__device__ __forceinline__ void take(const float (&means)[kNumel], bool accumulate, PackedChunk<float, kNumel>& chunk) {
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    chunk.words[i] = bits_of(accumulate ? float_of(chunk.words[i]) + means[i] : means[i]);
  }
}

template <class Stored, int kNumel>
__device__ __forceinline__ void take(const float (&means)[kNumel], bool, PackedChunk<Stored, kNumel>& chunk) {
  chunk = packed<PackedChunk<Stored, kNumel>>([&](int pair) { return Pair{means[2 * pair], means[2 * pair + 1]}; });
}

// A grid block takes kMeanThreads * 16 bytes of each member at a time.
template <class T, class Stored>
__global__ void __launch_bounds__(kMeanThreads) mean_kernel(
    MemberRows<T> members, ValueRows<Stored> means, Divisor divisor, bool accumulate, bool is_wide) {
  using Chunk = MemberChunk<T, Stored>;
  constexpr int kChunks = kFullChunkNumel<T> / Chunk::kNumel;
  constexpr int kGridBlockNumel = kMeanThreads * kFullChunkNumel<T>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGridBlockNumel;
  for (int64_t slice = blockIdx.y; slice < members.slices; slice += gridDim.y) {
    for (int64_t start = static_cast<int64_t>(blockIdx.x) * kGridBlockNumel; start < members.row_numel; start += step) {
      Extent extents[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int64_t first = start + (i * kMeanThreads + static_cast<int>(threadIdx.x)) * Chunk::kNumel;
        const int64_t count = members.row_numel - first;
        extents[i] = {first, count, is_wide && count >= Chunk::kNumel};
      }
      PackedChunk<Stored, Chunk::kNumel> stored[kChunks]{};
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (accumulate) {
          stored[i] = loaded<PackedChunk<Stored, Chunk::kNumel>>(means.row(slice), extents[i]);
        }
      }
      float totals[kChunks][Chunk::kNumel];
      load_means<Chunk>(members, slice, extents, divisor, totals);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        take(totals[i], accumulate, stored[i]);
        store(stored[i], extents[i], means.row(slice));
      }
    }
  }
}

// Whether all chunks of all rows start at multiples of 16 bytes.
template <class T>
bool have_wide_access(const MemberRows<T>& rows) {
  const auto stride_bytes = rows.member_stride * static_cast<int64_t>(sizeof(T));
  const bool are_members_aligned = rows.members == 1 || stride_bytes % kWideAccessBytes == 0;
  return are_members_aligned && has_wide_access(ValueRows<const T>{rows.base, rows.slice_stride}, rows.slices);
}

}  // namespace

template <class T, class Stored>
cudaError_t launch_mean(const MemberRows<T>& members, const ValueRows<Stored>& means, bool accumulate, cudaStream_t stream) {
  constexpr int64_t kGridBlockNumel = int64_t{kMeanThreads} * kFullChunkNumel<T>;
  const int64_t grid_blocks = (members.row_numel + kGridBlockNumel - 1) / kGridBlockNumel;
  const bool is_wide = have_wide_access(members) && has_wide_access(means, members.slices);
  const Divisor divisor = divisor_of(members.members);
  return start_grid(
      mean_kernel<T, Stored>, members.slices, grid_blocks, kMeanThreads, stream, members, means, divisor, accumulate, is_wide);
}

#define ZPP_INSTANTIATE(T, Stored) \
  template cudaError_t launch_mean<T, Stored>(const MemberRows<T>&, const ValueRows<Stored>&, bool, cudaStream_t);
ZPP_INSTANTIATE(float, float)
ZPP_INSTANTIATE(Bf16Bits, float)
ZPP_INSTANTIATE(Fp16Bits, float)
ZPP_INSTANTIATE(Bf16Bits, Bf16Bits)
ZPP_INSTANTIATE(Fp16Bits, Fp16Bits)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
