// decode_gaussian and decode_mean_gaussian on CPUs.
#include <torch/library.h>

#include "../../quantization/cpu/groups.h"
#include "../../quantization/cpu/mean_block.h"
#include "../arguments.h"
#include "decode_block.h"

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

template <int kBits, class T>
void launch_decode(
    GaussianRows<const uint8_t> payloads, ValueRows<T> values, int rounds, const std::vector<SenderSigns>& senders, bool accumulate) {
  for_each_group(payloads.rows.slices, payloads.blocks(), kGaussianNumel, [&](const Group& group, float* scratch) {
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      decode_message_block<kBits>(payloads, 0, group.slice, block, rounds, senders[group.slice], scratch);
      store_block(scratch, accumulate, values.run(group.slice) + block * kGaussianNumel);
    }
  });
}

template <int kBits>
void launch_decode_mean(
    GaussianRows<const uint8_t> payloads, ValueRows<float> means, int rounds, const std::vector<SenderSigns>& senders, bool accumulate) {
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

void decode_gaussian(
    const at::Tensor& payloads, at::Tensor& values, int64_t bits, int64_t rounds, at::IntArrayRef keys, bool accumulate) {
  check_values(values, "values");
  const GaussianRows<const uint8_t> rows{readable_payloads(payloads, "payloads", values.size(0), gaussian_layout(values.size(1), bits))};
  const int some_rounds = checked_rounds(rounds);
  const auto senders = signs_of(checked_keys(keys, values.size(0)));
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      launch_decode<decltype(kBits)::value>(rows, writable_values<decltype(zero)>(values), some_rounds, senders, accumulate);
    });
  });
}

void decode_mean_gaussian(
    const at::Tensor& payloads, at::Tensor& mean, int64_t bits, int64_t rounds, at::IntArrayRef keys, bool accumulate) {
  check_values(mean, "mean");
  TORCH_CHECK(mean.scalar_type() == at::kFloat, "mean must be float32, not ", mean.scalar_type());
  const GaussianRows<const uint8_t> rows{readable_members(payloads, "payloads", mean.size(0), gaussian_layout(mean.size(1), bits))};
  const int some_rounds = checked_rounds(rounds);
  const auto senders = signs_of(checked_keys(keys, rows.rows.members));
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    launch_decode_mean<decltype(kBits)::value>(rows, writable_values<float>(mean), some_rounds, senders, accumulate);
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) {
  m.impl("decode_gaussian", megatron_zpp::cpu::decode_gaussian);
  m.impl("decode_mean_gaussian", megatron_zpp::cpu::decode_mean_gaussian);
}
