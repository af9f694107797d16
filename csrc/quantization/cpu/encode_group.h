// Scales and codes of one group of blocks, in loops that compilers vectorise.
#pragma once

#include "../exact_reciprocal.h"
#include "../noise.h"
#include "../rows.h"
#include "groups.h"
#include "half_loops.h"
#include "torch_values.h"
#include "widen.h"

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

constexpr int64_t kHashedNumel = 512;  // values whose hashes are at hand at a time

inline void store_hashes(const Noise& noise, int64_t first_pair, int64_t pairs, uint32_t* __restrict hashes) {
  for (int64_t i = 0; i < pairs; ++i) {
    hashes[i] = pair_hash(noise, first_pair + i);
  }
}

template <int kBits>
void store_noisy_codes(const float* __restrict values, int64_t numel, float scale, const uint32_t* __restrict hashes, uint8_t* __restrict codes) {
  for (int64_t pair = 0; pair < numel / 2; ++pair) {
    store_pair<kBits>(
        codes,
        pair,
        noisy_code_of<kBits>(values[2 * pair], scale, even_noise(hashes[pair])),
        noisy_code_of<kBits>(values[2 * pair + 1], scale, odd_noise(hashes[pair])));
  }
}

// first_pair: of the block's values, counted over all slices.
template <int kBits, class T>
void encode_noisy_block(const T* values, int64_t numel, float scale, const Noise& noise, int64_t first_pair, uint8_t* codes) {
  if (!has_codes(scale)) {
    memset(codes, 0, numel / 8 * kBits);
    return;
  }
  for (int64_t first = 0; first < numel; first += kHashedNumel) {
    const int64_t some = std::min(kHashedNumel, numel - first);
    uint32_t hashes[kHashedNumel / 2];
    float wide[kHashedNumel];
    store_hashes(noise, first_pair + first / 2, some / 2, hashes);
    widen(values + first, some, wide);
    store_noisy_codes<kBits>(wide, some, scale, hashes, codes + first / 8 * kBits);
  }
}

// Encodes the group's blocks, whose values start at `values`. First all scales, then all codes: one after the other, each block would wait
// for its own divisions. scratch: fp32 [block_numel], for fp16 values alone.
template <int kBits, class T>
void encode_group(
    const T* values, float* scratch, const Group& group, int64_t block_numel, const Noise& noise, const PayloadRows<uint8_t>& payloads) {
  const int64_t block_bytes = block_numel / 8 * kBits;
  uint8_t* codes = payloads.codes(0, group.slice) + group.first_block * block_bytes;
  float* __restrict scales = payloads.scales(0, group.slice) + group.first_block;
  typename ValueFormat<T>::Magnitude largest[kMostGroupBlocks];
  float factors[kMostGroupBlocks] = {};
  for (int64_t block = 0; block < group.blocks; ++block) {
    largest[block] = largest_magnitude(values + block * block_numel, block_numel);
  }
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
    if (noise.is_on) {
      encode_noisy_block<kBits>(source, block_numel, scales[block], noise, first_pair + block * (block_numel / 2), target);
    } else {
      encode_block<kBits>(source, block_numel, scales[block], factors[block], scratch, target);
    }
  }
}

}  // namespace megatron_zpp::cpu
