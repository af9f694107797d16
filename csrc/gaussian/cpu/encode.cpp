// encode_gaussian on CPUs.
#include <torch/library.h>

#include "../../quantization/cpu/groups.h"
#include "../arguments.h"
#include "encode_block.h"

namespace megatron_zpp::cpu {
namespace {

template <int kBits, class T>
void launch_encode(ValueRows<const T> values, GaussianRows<uint8_t> payloads, int rounds, const Noise& noise) {
  const Signs signs[kMostRounds] = {signs_of_round(noise, 0), signs_of_round(noise, 1)};
  for_each_group(payloads.rows.slices, payloads.blocks(), kGaussianNumel, [&](const Group& group, float* scratch) {
    uint16_t* scales = payloads.scales(0, group.slice);
    uint8_t* planes = payloads.planes(0, group.slice);
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      const float* source = widened(values.run(group.slice) + block * kGaussianNumel, scratch);
      scales[block] = encode_gaussian_block<kBits>(source, rounds, signs, planes + block * kBits * kPlaneBytes);
    }
  });
}

void encode_gaussian(const at::Tensor& values, at::Tensor& payloads, int64_t bits, int64_t rounds, int64_t key) {
  check_values(values, "values");
  const GaussianRows<uint8_t> rows{writable_payloads(payloads, "payloads", values.size(0), gaussian_layout(values.size(1), bits))};
  const int some_rounds = checked_rounds(rounds);
  const Noise noise = noise_for(key);
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      launch_encode<decltype(kBits)::value>(readable_values<decltype(zero)>(values), rows, some_rounds, noise);
    });
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { m.impl("encode_gaussian", megatron_zpp::cpu::encode_gaussian); }
