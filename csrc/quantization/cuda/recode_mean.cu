// recode_mean_blocks on GPUs: the step between the two hops of a descent, in one pass. The fp32 mean never leaves the registers.
// A block of more than 16,384 values is read twice.
#include "encode_block.h"
#include "launchers.h"
#include "mean_of_members.h"

namespace megatron_zpp::cuda {
namespace {

using Chunk = WideChunk<8>;

template <class Teams, int kBits, int kNextBits>
__global__ void __launch_bounds__(Teams::kGridBlockThreads) recode_mean_kernel(
    PayloadRows<const uint8_t> payloads, PayloadRows<uint8_t> recoded, int64_t block_numel, Divisor divisor, Noise noise) {
  for_each_block<Teams>(payloads.slices, payloads.layout.blocks, block_numel, [&](int64_t slice, int64_t block, const Share& share) {
    encode_block<Teams, kNextBits, Chunk>(
        share,
        [&](const Piece& piece, Chunk(&held)[Teams::kHeld]) {
          float totals[Teams::kHeld][Chunk::kNumel];
          load_mean<Teams, kBits>(payloads, slice, block, block_numel / 8 * kBits, share, piece, divisor, totals);
#pragma unroll
          for (int i = 0; i < Teams::kHeld; ++i) {
#pragma unroll
            for (int j = 0; j < Chunk::kNumel; ++j) {
              held[i].values[j] = totals[i][j];
            }
          }
        },
        BlockNoise{noise, slice * payloads.layout.blocks + block, block_numel},
        recoded.codes(0, slice) + block * (block_numel / 8 * kNextBits),
        recoded.scales(0, slice) + block);
  });
}

}  // namespace

template <int kBits, int kNextBits>
cudaError_t launch_recode_mean(
    PayloadRows<const uint8_t> payloads, PayloadRows<uint8_t> recoded, int64_t block_numel, Noise noise, cudaStream_t stream) {
  const Divisor divisor = divisor_of(payloads.members);
  return dispatch_teams<Chunk::kNumel>(block_numel, [&](auto teams) {
    using Teams = decltype(teams);
    return start<Teams>(
        recode_mean_kernel<Teams, kBits, kNextBits>,
        payloads.slices,
        payloads.layout.blocks,
        stream,
        payloads,
        recoded,
        block_numel,
        divisor,
        noise);
  });
}

#define ZPP_INSTANTIATE(bits, next_bits) \
  template cudaError_t launch_recode_mean<bits, next_bits>(PayloadRows<const uint8_t>, PayloadRows<uint8_t>, int64_t, Noise, cudaStream_t);
ZPP_INSTANTIATE(4, 4)
ZPP_INSTANTIATE(4, 8)
ZPP_INSTANTIATE(8, 4)
ZPP_INSTANTIATE(8, 8)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
