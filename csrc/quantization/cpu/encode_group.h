// Scales and codes of one group of blocks, in loops that compilers vectorise.
#pragma once

#include "../exact_reciprocal.h"
#include "groups.h"
#include "half_loops.h"
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

template <int kBits, class ToCode>
void store_codes(const float* __restrict values, int64_t numel, float*, uint8_t* __restrict codes, ToCode to_code) {
  if constexpr (kBits == 8) {
    for (int64_t i = 0; i < numel; ++i) {
      codes[i] = static_cast<uint8_t>(to_code(values[i]));
    }
  } else {
    for (int64_t pair = 0; pair < numel / 2; ++pair) {
      store_pair<kBits>(codes, pair, to_code(values[2 * pair]), to_code(values[2 * pair + 1]));
    }
  }
}

// scratch: fp32 [numel].
template <int kBits, class ToCode>
void store_codes(const c10::Half* __restrict values, int64_t numel, float* __restrict scratch, uint8_t* __restrict codes, ToCode to_code) {
  widen_half(values, numel, scratch);
  store_codes<kBits>(scratch, numel, scratch, codes, to_code);
}

template <int kBits, class T>
void encode_block(const T* values, int64_t numel, float scale, float factor, float* scratch, uint8_t* codes) {
  if (!has_codes(scale)) {
    memset(codes, 0, numel / 8 * kBits);
  } else if (factor != 0.0f) {
    store_codes<kBits>(values, numel, scratch, codes, [factor](float value) { return rounded(value * factor); });
  } else {
    store_codes<kBits>(values, numel, scratch, codes, [scale](float value) { return code_of<kBits>(value, scale); });
  }
}

// Encodes `blocks` neighbouring blocks. First all scales, then all codes: one after the other, each block would wait for its own divisions.
template <int kBits, class T>
void encode_group(const T* values, int64_t blocks, int64_t block_numel, float* scratch, uint8_t* codes, float* __restrict scales) {
  typename ValueFormat<T>::Magnitude largest[kMostGroupBlocks];
  float factors[kMostGroupBlocks] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    largest[block] = largest_magnitude(values + block * block_numel, block_numel);
  }
  for (int64_t block = 0; block < blocks; ++block) {
    scales[block] = block_scale<T, kBits>(largest[block]);
    if constexpr (ValueFormat<T>::kSignificandBits <= 11) {
      factors[block] = exact_reciprocal<T, kBits>(largest[block], scales[block]);
    }
  }
  for (int64_t block = 0; block < blocks; ++block) {
    encode_block<kBits>(
        values + block * block_numel, block_numel, scales[block], factors[block], scratch, codes + block * (block_numel / 8 * kBits));
  }
}

}  // namespace megatron_zpp::cpu
