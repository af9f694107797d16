// encode_blocks on CPUs.
#include <torch/library.h>

#include "../arguments.h"
#include "encode_group.h"

namespace megatron_zpp::cpu {
namespace {

template <int kBits, class T>
void launch_encode(ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    encode_group<kBits>(
        values.run(group.slice) + group.first_block * block_numel,
        group.blocks,
        block_numel,
        scratch,
        payloads.codes(0, group.slice) + group.first_block * (block_numel / 8 * kBits),
        payloads.scales(0, group.slice) + group.first_block);
  });
}

void encode_blocks(const at::Tensor& values, at::Tensor& payloads, int64_t bits, int64_t block_numel) {
  check_values(values, "values");
  check_format(values.size(1), bits, block_numel);
  const auto rows = writable_payloads(payloads, "payloads", values.size(0), row_layout(values.size(1), bits, block_numel));
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      launch_encode<decltype(kBits)::value>(readable_values<decltype(zero)>(values), rows, block_numel);
    });
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { m.impl("encode_blocks", megatron_zpp::cpu::encode_blocks); }
