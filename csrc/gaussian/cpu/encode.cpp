// encode_gaussian on CPUs.
#include "../../quantization/cpu/groups.h"
#include "encode_block.h"
#include "launchers.h"

namespace megatron_zpp::cpu {

template <int kBits, class T>
void launch_encode_gaussian(ValueRows<const T> values, GaussianRows<uint8_t> payloads, int rounds, const Noise& noise) {
  const Signs signs[kMostRounds] = {signs_of_round(noise, 0), signs_of_round(noise, 1)};
  for_each_group(payloads.rows.slices, payloads.blocks(), kGaussianNumel, [&](const Group& group, float* scratch) {
    uint16_t* scales = payloads.scales(0, group.slice);
    uint8_t* planes = payloads.planes(0, group.slice);
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      const float* source = widened(values.row(group.slice) + block * kGaussianNumel, scratch);
      scales[block] = encode_gaussian_block<kBits>(source, rounds, signs, planes + block * kBits * kPlaneBytes);
    }
  });
}

#define ZPP_INSTANTIATE(bits, T) \
  template void launch_encode_gaussian<bits, T>(ValueRows<const T>, GaussianRows<uint8_t>, int, const Noise&);
#define ZPP_INSTANTIATE_BITS(T) ZPP_INSTANTIATE(1, T) ZPP_INSTANTIATE(2, T) ZPP_INSTANTIATE(3, T) ZPP_INSTANTIATE(4, T)
ZPP_INSTANTIATE_BITS(float)
ZPP_INSTANTIATE_BITS(c10::BFloat16)
ZPP_INSTANTIATE_BITS(c10::Half)
#undef ZPP_INSTANTIATE_BITS
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
