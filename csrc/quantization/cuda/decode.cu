// decode_blocks on GPUs.
#include "code_chunks.h"
#include "launchers.h"
#include "teams.h"

namespace megatron_zpp::cuda {
namespace {

template <int kBits, class T>
__device__ __forceinline__ PackedChunk<T> decoded_chunk(const CodeChunk<kBits, PackedChunk<T>::kNumel>& codes, float scale) {
  PackedChunk<T> chunk;
  for_each_pair(codes, scale, [&](int pair, Pair values) { set_pair(chunk, pair, values); });
  if (ValueFormat<float>::magnitude(scale) >= ValueFormat<float>::kInfinity) {
    make_nan_canonical(chunk);
  }
  return chunk;
}

template <class Teams, int kBits, class T>
__device__ __forceinline__ void decode_block(const uint8_t* codes, const float* scale_source, const Share& share, bool is_wide, T* values) {
  using Codes = CodeChunk<kBits, Teams::kChunkNumel>;
  const float scale = share.chunks > 0 ? *scale_source : 0.0f;
  for (int64_t index = 0; index < pieces_of<Teams>(share); ++index) {
    const Piece piece = piece_at<Teams>(share, index);
    const uint8_t* source = codes + piece.first * Codes::kBytes;
    T* target = values + piece.first * Teams::kChunkNumel;
    Codes held[Teams::kHeld];
    for_each_held<Teams>(share, piece, [&](int i, int chunk) {
      held[i] = load_codes<kBits, Teams::kChunkNumel>(source + chunk * Codes::kBytes);
    });
    for_each_held<Teams>(share, piece, [&](int i, int chunk) {
      const PackedChunk<T> decoded = decoded_chunk<kBits, T>(held[i], scale);
      T* to = target + chunk * Teams::kChunkNumel;
      is_wide ? store_wide(decoded, to) : store_narrow(decoded, to);
    });
  }
}

template <class Teams, int kBits, class T>
__global__ void __launch_bounds__(Teams::kGridBlockThreads)
    decode_kernel(PayloadRows<const uint8_t> payloads, ValueRows<T> values, int64_t block_numel, bool is_wide) {
  for_each_block<Teams>(payloads.slices, payloads.layout.blocks, block_numel, [&](int64_t slice, int64_t block, const Share& share) {
    decode_block<Teams, kBits>(
        payloads.codes(0, slice) + block * (block_numel / 8 * kBits),
        payloads.scales(0, slice) + block,
        share,
        is_wide,
        values.row(slice) + block * block_numel);
  });
}

}  // namespace

template <int kBits, class T>
cudaError_t launch_decode(PayloadRows<const uint8_t> payloads, ValueRows<T> values, int64_t block_numel, cudaStream_t stream) {
  const bool is_wide = has_wide_access(values, payloads.slices);
  return dispatch_teams<PackedChunk<T>::kNumel>(block_numel, [&](auto teams) {
    using Teams = decltype(teams);
    return start<Teams>(
        decode_kernel<Teams, kBits, T>, payloads.slices, payloads.layout.blocks, stream, payloads, values, block_numel, is_wide);
  });
}

#define ZPP_INSTANTIATE(bits, T) \
  template cudaError_t launch_decode<bits, T>(PayloadRows<const uint8_t>, ValueRows<T>, int64_t, cudaStream_t);
ZPP_INSTANTIATE(4, float)
ZPP_INSTANTIATE(4, Bf16Bits)
ZPP_INSTANTIATE(4, Fp16Bits)
ZPP_INSTANTIATE(8, float)
ZPP_INSTANTIATE(8, Bf16Bits)
ZPP_INSTANTIATE(8, Fp16Bits)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
