// encode_blocks on CPUs.
#include <torch/library.h>

#include "../arguments.h"
#include "encode_group.h"
#include "rotate.h"

namespace megatron_zpp::cpu {
namespace {

template <int kBits, class T>
void launch_encode(ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, const Noise& noise) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    encode_group<kBits>(values.run(group.slice) + group.first_block * block_numel, scratch, group, block_numel, noise, payloads);
  });
}

template <int kBits, class T>
void launch_encode_rotated(ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, const Noise& noise) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    const int64_t numel = group.blocks * block_numel;
    widen(values.run(group.slice) + group.first_block * block_numel, numel, scratch);
    rotate(scratch, numel, 1.0f);
    encode_group<kBits>(static_cast<const float*>(scratch), nullptr, group, block_numel, noise, payloads);
  });
}

void encode_blocks(
    const at::Tensor& values, at::Tensor& payloads, int64_t bits, int64_t block_numel, bool rotated, std::optional<int64_t> noise_key) {
  check_values(values, "values");
  check_format(values.size(1), bits, block_numel);
  const auto rows = writable_payloads(payloads, "payloads", values.size(0), row_layout(values.size(1), bits, block_numel));
  const Noise noise = noise_for(noise_key);
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      const auto launch = rotated ? launch_encode_rotated<decltype(kBits)::value, decltype(zero)>
                                  : launch_encode<decltype(kBits)::value, decltype(zero)>;
      launch(readable_values<decltype(zero)>(values), rows, block_numel, noise);
    });
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { m.impl("encode_blocks", megatron_zpp::cpu::encode_blocks); }
