// encode_blocks on CPUs.
#include "encode_group.h"
#include "launchers.h"
#include "rotate.h"

namespace megatron_zpp::cpu {
namespace {

template <int kBits, class T>
void encode(ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, const Noise& noise) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    const T* source = values.row(group.slice) + group.first_block * block_numel;
    encode_group<kBits>(source, group, block_numel, noise, scratch, payloads);
  });
}

template <int kBits, class T>
void encode_rotated(ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, const Noise& noise) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    const T* source = values.row(group.slice) + group.first_block * block_numel;
    uint32_t largest[kMostGroupBlocks];
    for (int64_t block = 0; block < group.blocks; ++block) {
      largest[block] = rotate(source + block * block_numel, block_numel, 1.0f, scratch + block * block_numel);
    }
    encode_group<kBits>(static_cast<const float*>(scratch), largest, group, block_numel, noise, nullptr, payloads);
  });
}

}  // namespace

template <int kBits, class T>
void launch_encode(ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, bool rotated, const Noise& noise) {
  if (rotated) {
    encode_rotated<kBits>(values, payloads, block_numel, noise);
  } else {
    encode<kBits>(values, payloads, block_numel, noise);
  }
}

#define ZPP_INSTANTIATE(bits, T) \
  template void launch_encode<bits, T>(ValueRows<const T>, PayloadRows<uint8_t>, int64_t, bool, const Noise&);
ZPP_INSTANTIATE(4, float)
ZPP_INSTANTIATE(4, c10::BFloat16)
ZPP_INSTANTIATE(4, c10::Half)
ZPP_INSTANTIATE(8, float)
ZPP_INSTANTIATE(8, c10::BFloat16)
ZPP_INSTANTIATE(8, c10::Half)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
