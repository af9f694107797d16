// decode_mean_blocks on CPUs: the last step of a descent.
#include "groups.h"
#include "launchers.h"
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

}  // namespace

template <int kBits>
void launch_decode_mean(
    PayloadRows<const uint8_t> payloads, ValueRows<float> means, int64_t block_numel, bool accumulate, bool rotated) {
  for_each_group(payloads.slices, payloads.layout.blocks, block_numel, [&](const Group& group, float* scratch) {
    for (int64_t block = group.first_block; block < group.first_block + group.blocks; ++block) {
      float* mean = means.row(group.slice) + block * block_numel;
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

#define ZPP_INSTANTIATE(bits) template void launch_decode_mean<bits>(PayloadRows<const uint8_t>, ValueRows<float>, int64_t, bool, bool);
ZPP_INSTANTIATE(4)
ZPP_INSTANTIATE(8)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
