// Computes the mean over members of one block of codes.
#pragma once

#include "../rows.h"
#include "decode_block.h"

namespace megatron_zpp::cpu {

// Sums the block over members 0, 1, ... into total [block_numel].
template <int kBits>
void sum_block(const PayloadRows<const uint8_t>& payloads, int64_t slice, int64_t block, int64_t block_numel, float* __restrict total) {
  const int64_t offset = block * (block_numel / 8 * kBits);
  store_decoded<kBits>(payloads.codes(0, slice) + offset, payloads.scales(0, slice)[block], block_numel, nullptr, total);
  for (int64_t member = 1; member < payloads.members; ++member) {
    const uint8_t* codes = payloads.codes(member, slice) + offset;
    const float scale = payloads.scales(member, slice)[block];
    for_each_decoded<kBits>(codes, scale, block_numel, [total](int64_t i, float value) { total[i] += value; });
  }
}

// Divides by the number of members. For a power of two, dividing and multiplying by the inverse round the same number, so they are equal.
inline void divide_block(float* __restrict total, int64_t numel, int64_t members) {
  const float divisor = static_cast<float>(members);
  if (members == 1) {
    return;
  }
  if ((members & (members - 1)) == 0) {
    const float inverse = 1.0f / divisor;
    for (int64_t i = 0; i < numel; ++i) {
      total[i] *= inverse;
    }
  } else {
    for (int64_t i = 0; i < numel; ++i) {
      total[i] /= divisor;
    }
  }
}

template <int kBits>
void mean_block(const PayloadRows<const uint8_t>& payloads, int64_t slice, int64_t block, int64_t block_numel, float* mean) {
  sum_block<kBits>(payloads, slice, block, block_numel, mean);
  divide_block(mean, block_numel, payloads.members);
}

}  // namespace megatron_zpp::cpu
