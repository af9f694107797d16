// recode_mean_blocks on CPUs: the step between the two hops of a descent, in one pass. The fp32 mean never leaves the first-level cache.
#include <torch/library.h>

#include "../arguments.h"
#include "encode_group.h"
#include "mean_block.h"

namespace megatron_zpp::cpu {
namespace {

template <int kBits, int kNextBits>
void launch_recode_mean(
    PayloadRows<const uint8_t> payloads, PayloadRows<uint8_t> recoded, int64_t block_numel, const Noise& noise) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* means) {
    for (int64_t block = 0; block < group.blocks; ++block) {
      mean_block<kBits>(payloads, group.slice, group.first_block + block, block_numel, means + block * block_numel);
    }
    encode_group<kNextBits>(static_cast<const float*>(means), group, block_numel, noise, nullptr, recoded);
  });
}

void recode_mean_blocks(
    const at::Tensor& payloads,
    at::Tensor& recoded,
    int64_t run_numel,
    int64_t bits,
    int64_t next_bits,
    int64_t block_numel,
    std::optional<int64_t> noise_key) {
  check_format(run_numel, bits, block_numel);
  check_format(run_numel, next_bits, block_numel);
  TORCH_CHECK(recoded.dim() == 2, "recoded must have 2 dims, [slices, bytes], not ", recoded.dim());
  const int64_t slices = recoded.size(0);
  const auto rows = readable_members(payloads, "payloads", slices, row_layout(run_numel, bits, block_numel));
  const auto next_rows = writable_payloads(recoded, "recoded", slices, row_layout(run_numel, next_bits, block_numel));
  const Noise noise = noise_for(noise_key);
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_bits(next_bits, [&](auto kNextBits) {
      launch_recode_mean<decltype(kBits)::value, decltype(kNextBits)::value>(rows, next_rows, block_numel, noise);
    });
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { m.impl("recode_mean_blocks", megatron_zpp::cpu::recode_mean_blocks); }
