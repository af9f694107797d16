// encode_blocks on GPUs: values are read once, 16 bytes at a time, and stay in registers until their block's scale is known.
// A block of more than 16,384 values is read twice.
#include "encode_block.h"
#include "launchers.h"
#include "rotate_chunks.h"

namespace megatron_zpp::cuda {
namespace {

template <class Teams, class T>
__device__ __forceinline__ void load_held(
    const T* values, const Share& share, const Piece& piece, bool is_wide, PackedChunk<T> (&held)[Teams::kHeld]) {
  const T* source = values + piece.first * Teams::kChunkNumel;
  const auto load_each = [&](auto load) {
#pragma unroll
    for (int i = 0; i < Teams::kHeld; ++i) {
      held[i] = PackedChunk<T>{};
    }
    for_each_held<Teams>(share, piece, [&](int i, int chunk) { load(source + chunk * Teams::kChunkNumel, held[i]); });
  };
  if (is_wide) {
    load_each([](const T* from, PackedChunk<T>& chunk) { load_wide(from, chunk); });
  } else {
    load_each([](const T* from, PackedChunk<T>& chunk) { load_narrow(from, chunk); });
  }
}

template <class Teams, class T>
__device__ __forceinline__ void load_held(
    const T* values, const Share& share, const Piece& piece, bool is_wide, WideChunk<PackedChunk<T>::kNumel> (&held)[Teams::kHeld]) {
  PackedChunk<T> packed[Teams::kHeld];
  load_held<Teams>(values, share, piece, is_wide, packed);
#pragma unroll
  for (int i = 0; i < Teams::kHeld; ++i) {
    held[i] = widened(packed[i]);
    rotate(held[i].values, share.thread);
  }
}

// Chunk: PackedChunk<T>, or the WideChunk of rotated values.
template <class Teams, int kBits, class Chunk, class T>
__global__ void __launch_bounds__(Teams::kGridBlockThreads, Teams::kLeastGridBlocks)
    encode_kernel(ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, Noise noise, bool is_wide) {
  for_each_block<Teams>(payloads.slices, payloads.layout.blocks, block_numel, [&](int64_t slice, int64_t block, const Share& share) {
    const T* source = values.row(slice) + block * block_numel;
    encode_block<Teams, kBits, Chunk>(
        share,
        [&](const Piece& piece, Chunk(&held)[Teams::kHeld]) { load_held<Teams>(source, share, piece, is_wide, held); },
        BlockNoise{noise, slice * payloads.layout.blocks + block, block_numel},
        payloads.codes(0, slice) + block * (block_numel / 8 * kBits),
        payloads.scales(0, slice) + block);
  });
}

}  // namespace

template <int kBits, class T>
cudaError_t launch_encode(
    ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, bool rotated, Noise noise, cudaStream_t stream) {
  constexpr int kChunkNumel = PackedChunk<T>::kNumel;
  const bool is_wide = has_wide_access(values, payloads.slices);
  return dispatch_teams<kChunkNumel>(block_numel, [&](auto teams) {
    using Teams = decltype(teams);
    const auto kernel =
        rotated ? encode_kernel<Teams, kBits, WideChunk<kChunkNumel>, T> : encode_kernel<Teams, kBits, PackedChunk<T>, T>;
    return start<Teams>(kernel, payloads.slices, payloads.layout.blocks, stream, values, payloads, block_numel, noise, is_wide);
  });
}

#define ZPP_INSTANTIATE(bits, T) \
  template cudaError_t launch_encode<bits, T>(ValueRows<const T>, PayloadRows<uint8_t>, int64_t, bool, Noise, cudaStream_t);
ZPP_INSTANTIATE(4, float)
ZPP_INSTANTIATE(4, Bf16Bits)
ZPP_INSTANTIATE(4, Fp16Bits)
ZPP_INSTANTIATE(8, float)
ZPP_INSTANTIATE(8, Bf16Bits)
ZPP_INSTANTIATE(8, Fp16Bits)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
