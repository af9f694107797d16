// decode_mean_blocks on GPUs: the last step of a descent.
#include "launchers.h"
#include "mean_of_members.h"
#include "rotate_chunks.h"

namespace megatron_zpp::cuda {
namespace {

constexpr int kChunkNumel = PackedChunk<float>::kNumel;

__device__ __forceinline__ void store_mean(const float (&totals)[kChunkNumel], bool accumulate, bool is_wide, float* mean) {
  PackedChunk<float> chunk;
  if (accumulate) {
    is_wide ? load_wide(mean, chunk) : load_narrow(mean, chunk);
  }
#pragma unroll
  for (int i = 0; i < kChunkNumel; ++i) {
    chunk.words[i] = bits_of(with_canonical_nan(accumulate ? float_of(chunk.words[i]) + totals[i] : totals[i]));
  }
  is_wide ? store_wide(chunk, mean) : store_narrow(chunk, mean);
}

template <class Teams>
__device__ __forceinline__ void rotate_back(float (&totals)[Teams::kHeld][kChunkNumel], int thread) {
#pragma unroll
  for (int i = 0; i < Teams::kHeld; ++i) {
    rotate(totals[i], thread);
#pragma unroll
    for (int j = 0; j < kChunkNumel; ++j) {
      totals[i][j] *= 1.0f / kRotatedNumel;
    }
  }
}

template <class Teams, int kBits>
__global__ void __launch_bounds__(Teams::kGridBlockThreads) decode_mean_kernel(
    PayloadRows<const uint8_t> payloads,
    ValueRows<float> means,
    int64_t block_numel,
    Divisor divisor,
    bool accumulate,
    bool rotated,
    bool is_wide) {
  for_each_block<Teams>(payloads.slices, payloads.layout.blocks, block_numel, [&](int64_t slice, int64_t block, const Share& share) {
    float* mean = means.row(slice) + block * block_numel;
    for (int64_t index = 0; index < pieces_of<Teams>(share); ++index) {
      const Piece piece = piece_at<Teams>(share, index);
      float totals[Teams::kHeld][kChunkNumel];
      load_mean<Teams, kBits>(payloads, slice, block, block_numel / 8 * kBits, share, piece, divisor, totals);
      if (rotated) {
        rotate_back<Teams>(totals, share.thread);
      }
      float* target = mean + piece.first * kChunkNumel;
      for_each_held<Teams>(share, piece, [&](int i, int chunk) {
        store_mean(totals[i], accumulate, is_wide, target + chunk * kChunkNumel);
      });
    }
  });
}

}  // namespace

template <int kBits>
cudaError_t launch_decode_mean(
    PayloadRows<const uint8_t> payloads, ValueRows<float> means, int64_t block_numel, bool accumulate, bool rotated, cudaStream_t stream) {
  const Divisor divisor = divisor_of(payloads.members);
  const bool is_wide = has_wide_access(means, payloads.slices);
  return dispatch_teams<kChunkNumel>(block_numel, [&](auto teams) {
    using Teams = decltype(teams);
    return start<Teams>(
        decode_mean_kernel<Teams, kBits>,
        payloads.slices,
        payloads.layout.blocks,
        stream,
        payloads,
        means,
        block_numel,
        divisor,
        accumulate,
        rotated,
        is_wide);
  });
}

template cudaError_t launch_decode_mean<4>(PayloadRows<const uint8_t>, ValueRows<float>, int64_t, bool, bool, cudaStream_t);
template cudaError_t launch_decode_mean<8>(PayloadRows<const uint8_t>, ValueRows<float>, int64_t, bool, bool, cudaStream_t);

}  // namespace megatron_zpp::cuda
