// Computes the scales and codes of one group of blocks, in loops that compilers vectorise.
#pragma once

#include "../exact_reciprocal.h"
#include "../rows.h"
#include "groups.h"
#include "half_loops.h"
#include "quotient_codes.h"
#include "torch_values.h"

namespace megatron_zpp::cpu {

template <class T>
typename ValueFormat<T>::Magnitude largest_magnitude(const T* __restrict values, int64_t numel) {
  typename ValueFormat<T>::Magnitude largest = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const auto magnitude = ValueFormat<T>::magnitude(values[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// to_code: fp32 value to an integer with the code in its low bits.
template <int kBits, class ToCode>
void store_codes(const c10::BFloat16* __restrict values, int64_t numel, float*, uint8_t* __restrict codes, ToCode to_code) {
  for (int64_t pair = 0; pair < numel / 2; ++pair) {
    uint32_t word;
    memcpy(&word, values + 2 * pair, sizeof(word));
    store_pair<kBits>(codes, pair, to_code(float_of(word << 16)), to_code(float_of(word & 0xffff0000u)));
  }
}

// scratch: fp32 [numel].
template <int kBits, class ToCode>
void store_codes(const c10::Half* __restrict values, int64_t numel, float* __restrict scratch, uint8_t* __restrict codes, ToCode to_code) {
  widen_half(values, numel, scratch);
  store_codes<kBits>(scratch, numel, codes, to_code);
}

template <int kBits, class T>
void store_nearest(const T* values, int64_t numel, float scale, float factor, float* scratch, uint8_t* codes) {
  if (factor != 0.0f) {
    store_codes<kBits>(values, numel, scratch, codes, [factor](float value) { return rounded(value * factor); });
  } else {
    store_codes<kBits>(values, numel, scratch, codes, [scale](float value) { return code_of<kBits>(value, scale); });
  }
}

template <int kBits>
void store_nearest(const float* values, int64_t numel, float scale, float, float*, uint8_t* codes) {
  store_nearest<kBits>(values, numel, scale, codes);
}

// Encodes the group's blocks, whose values start at `values`. largest: largest magnitude of each block. scratch: fp32 [block_numel], only
// needed for fp16. All scales come first, then all codes; block by block, each block would wait for its own divisions.
template <int kBits, class T>
void encode_group(
    const T* values,
    const typename ValueFormat<T>::Magnitude (&largest)[kMostGroupBlocks],
    const Group& group,
    int64_t block_numel,
    const Noise& noise,
    float* scratch,
    const PayloadRows<uint8_t>& payloads) {
  const int64_t block_bytes = block_numel / 8 * kBits;
  uint8_t* codes = payloads.codes(0, group.slice) + group.first_block * block_bytes;
  float* __restrict scales = payloads.scales(0, group.slice) + group.first_block;
  float factors[kMostGroupBlocks] = {};
  for (int64_t block = 0; block < group.blocks; ++block) {
    scales[block] = block_scale<T, kBits>(largest[block]);
    if constexpr (ValueFormat<T>::kSignificandBits <= 11) {
      factors[block] = exact_reciprocal<T, kBits>(largest[block], scales[block]);
    }
  }
  const int64_t first_pair = (group.slice * payloads.layout.blocks + group.first_block) * (block_numel / 2);
  for (int64_t block = 0; block < group.blocks; ++block) {
    const T* source = values + block * block_numel;
    uint8_t* target = codes + block * block_bytes;
    if (!has_codes(scales[block])) {
      memset(target, 0, block_bytes);
    } else if (noise.is_on) {
      store_noisy<kBits>(source, block_numel, scales[block], noise, first_pair + block * (block_numel / 2), target);
    } else {
      store_nearest<kBits>(source, block_numel, scales[block], factors[block], scratch, target);
    }
  }
}

template <int kBits, class T>
void encode_group(
    const T* values, const Group& group, int64_t block_numel, const Noise& noise, float* scratch, const PayloadRows<uint8_t>& payloads) {
  typename ValueFormat<T>::Magnitude largest[kMostGroupBlocks];
  for (int64_t block = 0; block < group.blocks; ++block) {
    largest[block] = largest_magnitude(values + block * block_numel, block_numel);
  }
  encode_group<kBits>(values, largest, group, block_numel, noise, scratch, payloads);
}

}  // namespace megatron_zpp::cpu
