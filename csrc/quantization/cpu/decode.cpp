// decode_blocks on CPUs.
#include <torch/library.h>

#include "../arguments.h"
#include "decode_block.h"
#include "groups.h"

namespace megatron_zpp::cpu {
namespace {

template <int kBits, class T>
void launch_decode(PayloadRows<const uint8_t> payloads, ValueRows<T> values, int64_t block_numel) {
  const int64_t block_bytes = block_numel / 8 * kBits;
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    const uint8_t* codes = payloads.codes(0, group.slice);
    const float* scales = payloads.scales(0, group.slice);
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      decode_block<kBits>(codes + block * block_bytes, scales[block], block_numel, scratch, values.run(group.slice) + block * block_numel);
    }
  });
}

void decode_blocks(const at::Tensor& payloads, at::Tensor& values, int64_t bits, int64_t block_numel) {
  check_values(values, "values");
  check_format(values.size(1), bits, block_numel);
  const auto rows = readable_payloads(payloads, "payloads", values.size(0), row_layout(values.size(1), bits, block_numel));
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      launch_decode<decltype(kBits)::value>(rows, writable_values<decltype(zero)>(values), block_numel);
    });
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { m.impl("decode_blocks", megatron_zpp::cpu::decode_blocks); }
