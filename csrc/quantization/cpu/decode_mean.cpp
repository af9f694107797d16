// decode_mean_blocks on CPUs: the last step of a descent.
#include <torch/library.h>

#include "../arguments.h"
#include "groups.h"
#include "mean_block.h"
#include "rotate.h"

namespace megatron_zpp::cpu {
namespace {

void add_block(const float* __restrict total, int64_t numel, float* __restrict mean) {
  for (int64_t i = 0; i < numel; ++i) {
    mean[i] = with_canonical_nan(mean[i] + total[i]);
  }
}

// A mean can be NaN, because opposite infinities of two members add up to NaN.
void make_nan_canonical(float* mean, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    mean[i] = with_canonical_nan(mean[i]);
  }
}

template <int kBits>
void launch_decode_mean(
    PayloadRows<const uint8_t> payloads, ValueRows<float> means, int64_t block_numel, bool accumulate, bool rotated) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      float* mean = means.run(group.slice) + block * block_numel;
      float* total = accumulate ? scratch : mean;
      mean_block<kBits>(payloads, group.slice, block, block_numel, total);
      if (rotated) {
        rotate(total, block_numel, 1.0f / kRotatedNumel, total);
      }
      if (accumulate) {
        add_block(scratch, block_numel, mean);
      } else {
        make_nan_canonical(mean, block_numel);
      }
    }
  });
}

void decode_mean_blocks(const at::Tensor& payloads, at::Tensor& mean, int64_t bits, int64_t block_numel, bool accumulate, bool rotated) {
  check_values(mean, "mean");
  check_format(mean.size(1), bits, block_numel);
  TORCH_CHECK(mean.scalar_type() == at::kFloat, "mean must be float32, not ", mean.scalar_type());
  const auto rows = readable_members(payloads, "payloads", mean.size(0), row_layout(mean.size(1), bits, block_numel));
  dispatch_bits(bits, [&](auto kBits) {
    launch_decode_mean<decltype(kBits)::value>(rows, writable_values<float>(mean), block_numel, accumulate, rotated);
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { m.impl("decode_mean_blocks", megatron_zpp::cpu::decode_mean_blocks); }
