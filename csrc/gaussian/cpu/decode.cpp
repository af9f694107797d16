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
  std::vector<SenderSigns> senders;
  senders.reserve(noises.size());
  for (const Noise& noise : noises) {
    senders.push_back({{signs_of_round(noise, 0), signs_of_round(noise, 1)}});
  }
  return senders;
}

template <int kBits>
void decode_message_block(
    const GaussianRows<const uint8_t>& payloads, int64_t member, int64_t slice, int64_t block, int rounds, const SenderSigns& signs, float* values) {
  const uint8_t* planes = payloads.planes(member, slice) + block * kBits * kPlaneBytes;
  decode_gaussian_block<kBits>(planes, payloads.scales(member, slice)[block], rounds, signs.rounds, values);
}

}  // namespace

template <int kBits, class T>
void launch_decode_gaussian(
    GaussianRows<const uint8_t> payloads, ValueRows<T> values, int rounds, const std::vector<Noise>& noises, bool accumulate) {
  const std::vector<SenderSigns> senders = signs_of(noises);
  for_each_group(payloads.rows.slices, payloads.blocks(), kGaussianNumel, [&](const Group& group, float* scratch) {
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      decode_message_block<kBits>(payloads, 0, group.slice, block, rounds, senders[group.slice], scratch);
      store_block(scratch, accumulate, values.run(group.slice) + block * kGaussianNumel);
    }
  });
}

template <int kBits>
void launch_decode_mean_gaussian(
    GaussianRows<const uint8_t> payloads, ValueRows<float> means, int rounds, const std::vector<Noise>& noises, bool accumulate) {
  const std::vector<SenderSigns> senders = signs_of(noises);
  for_each_group(payloads.rows.slices, payloads.blocks(), kGaussianNumel, [&](const Group& group, float* scratch) {
    float* __restrict total = scratch;
    float* __restrict decoded = scratch + kGaussianNumel;
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      decode_message_block<kBits>(payloads, 0, group.slice, block, rounds, senders[0], total);
      for (int64_t member = 1; member < payloads.rows.members; ++member) {
        decode_message_block<kBits>(payloads, member, group.slice, block, rounds, senders[member], decoded);
        for (int i = 0; i < kGaussianNumel; ++i) {
          total[i] += decoded[i];
        }
      }
      divide_block(total, kGaussianNumel, payloads.rows.members);
      store_block(total, accumulate, means.run(group.slice) + block * kGaussianNumel);
    }
  });
}

#define ZPP_INSTANTIATE(bits, T) \
  template void launch_decode_gaussian<bits, T>(GaussianRows<const uint8_t>, ValueRows<T>, int, const std::vector<Noise>&, bool);
#define ZPP_INSTANTIATE_BITS(T) ZPP_INSTANTIATE(1, T) ZPP_INSTANTIATE(2, T) ZPP_INSTANTIATE(3, T) ZPP_INSTANTIATE(4, T)
ZPP_INSTANTIATE_BITS(float)
ZPP_INSTANTIATE_BITS(c10::BFloat16)
ZPP_INSTANTIATE_BITS(c10::Half)
#undef ZPP_INSTANTIATE_BITS
#undef ZPP_INSTANTIATE

#define ZPP_INSTANTIATE(bits) \
  template void launch_decode_mean_gaussian<bits>(GaussianRows<const uint8_t>, ValueRows<float>, int, const std::vector<Noise>&, bool);
ZPP_INSTANTIATE(1)
ZPP_INSTANTIATE(2)
ZPP_INSTANTIATE(3)
ZPP_INSTANTIATE(4)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
