// recode_mean_blocks on CPUs: the step between the two hops of a descent, in one pass. The fp32 mean never leaves the first-level cache.
#include "encode_group.h"
#include "launchers.h"
#include "mean_block.h"

namespace megatron_zpp::cpu {

template <int kBits, int kNextBits>
void launch_recode_mean(
    PayloadRows<const uint8_t> payloads, PayloadRows<uint8_t> recoded, int64_t block_numel, const Noise& noise) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* means) {
    for (int64_t block = 0; block < group.blocks; ++block) {
      mean_block<kBits>(payloads, group.slice, group.first_block + block, block_numel, means + block * block_numel);
    }
    encode_group<kNextBits>(static_cast<const float*>(means), group, block_numel, noise, nullptr, recoded);
  });
}

#define ZPP_INSTANTIATE(bits, next_bits) \
  template void launch_recode_mean<bits, next_bits>(PayloadRows<const uint8_t>, PayloadRows<uint8_t>, int64_t, const Noise&);
ZPP_INSTANTIATE(4, 4)
ZPP_INSTANTIATE(4, 8)
ZPP_INSTANTIATE(8, 4)
ZPP_INSTANTIATE(8, 8)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
