// decode_gaussian and decode_mean_gaussian on CPUs.
#include "../../quantization/cpu/groups.h"
#include "../../quantization/cpu/mean_block.h"
#include "decode_block.h"
#include "launchers.h"

namespace megatron_zpp::cpu {
namespace {

// The signs of one sender.
struct SenderSigns {
  Signs rounds[kMostRounds];
};

std::vector<SenderSigns> signs_of(const std::vector<Noise>& noises) {
  std::vector<SenderSigns> signs;
  signs.reserve(noises.size());
  for (const Noise& noise : noises) {
    signs.push_back({{signs_of_round(noise, 0), signs_of_round(noise, 1)}});
  }
  return signs;
}

}  // namespace

template <int kBits, class T>
void launch_decode_gaussian(
    GaussianRows<const uint8_t> payloads, ValueRows<T> means, int rounds, const SenderNoises& senders, bool accumulate) {
  const std::vector<SenderSigns> signs = signs_of(senders.noises);
  for_each_group(payloads.rows.slices, payloads.blocks(), kGaussianNumel, [&](const Group& group, float* scratch) {
    float* __restrict total = scratch;
    float* __restrict other = scratch + kGaussianNumel;
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      for (int64_t member = 0; member < payloads.rows.members; ++member) {
        const uint8_t* planes = payloads.planes(member, group.slice) + block * kBits * kPlaneBytes;
        const uint16_t scale = payloads.scales(member, group.slice)[block];
        const SenderSigns& sender = signs[senders.is_by_slice ? group.slice : member];
        decode_gaussian_block<kBits>(planes, scale, rounds, sender.rounds, member == 0 ? total : other);
        if (member > 0) {
          for (int i = 0; i < kGaussianNumel; ++i) {
            total[i] += other[i];
          }
        }
      }
      divide_block(total, kGaussianNumel, payloads.rows.members);
      store_block(total, accumulate, means.row(group.slice) + block * kGaussianNumel);
    }
  });
}

#define ZPP_INSTANTIATE(bits, T) \
  template void launch_decode_gaussian<bits, T>(GaussianRows<const uint8_t>, ValueRows<T>, int, const SenderNoises&, bool);
#define ZPP_INSTANTIATE_BITS(T) ZPP_INSTANTIATE(1, T) ZPP_INSTANTIATE(2, T) ZPP_INSTANTIATE(3, T) ZPP_INSTANTIATE(4, T)
ZPP_INSTANTIATE_BITS(float)
ZPP_INSTANTIATE_BITS(c10::BFloat16)
ZPP_INSTANTIATE_BITS(c10::Half)
#undef ZPP_INSTANTIATE_BITS
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
