// decode_blocks on CPUs.
#include "decode_block.h"
#include "groups.h"
#include "launchers.h"

namespace megatron_zpp::cpu {

template <int kBits, class T>
void launch_decode(PayloadRows<const uint8_t> payloads, ValueRows<T> values, int64_t block_numel) {
  const int64_t block_bytes = block_numel / 8 * kBits;
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    const uint8_t* codes = payloads.codes(0, group.slice);
    const float* scales = payloads.scales(0, group.slice);
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      decode_block<kBits>(codes + block * block_bytes, scales[block], block_numel, scratch, values.row(group.slice) + block * block_numel);
    }
  });
}

#define ZPP_INSTANTIATE(bits, T) template void launch_decode<bits, T>(PayloadRows<const uint8_t>, ValueRows<T>, int64_t);
ZPP_INSTANTIATE(4, float)
ZPP_INSTANTIATE(4, c10::BFloat16)
ZPP_INSTANTIATE(4, c10::Half)
ZPP_INSTANTIATE(8, float)
ZPP_INSTANTIATE(8, c10::BFloat16)
ZPP_INSTANTIATE(8, c10::Half)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
