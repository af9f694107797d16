// The mask of dropout: a function of a key and of an element's index, so it depends neither on the thread, nor on the device, nor on how the
// elements are divided into tensors. One definition for host and device; megatron_zpp/ops/dropout_reference.py has the same in plain torch.
//
// An element is dropped if its 32-bit hash is below the threshold, which is 2^32 times the probability. It is kept as value * scale, a
// product in fp32, rounded once more to 16 bits if the values have 16. The hash is that of noise.h, of the low half of the index and a word
// for each 2^32 elements, which is a hash itself: the two rounds after the word comes in would not spread a change of its upper bits to all
// bits of the result. This file does not include torch.
#pragma once

#include "../quantization/noise.h"

namespace megatron_zpp {

struct Mask {
  Noise noise;
  uint64_t first_index;  // of the first of the values
  uint32_t threshold;
  float scale;

  // The hashes of element i and of those after it, for before_carry(i) elements.
  ZPP_HOST_DEVICE PairHashes hashes(int64_t i) const {
    const uint64_t index = first_index + static_cast<uint64_t>(i);
    const uint32_t word = hashed(static_cast<uint32_t>(index >> 32) + noise.second_word, noise.first_word);
    return {static_cast<uint32_t>(index) + noise.first_word, word};
  }
  // The number of elements from i on whose indices have the same upper half.
  ZPP_HOST_DEVICE int64_t before_carry(int64_t i) const {
    return (int64_t{1} << 32) - static_cast<uint32_t>(first_index + static_cast<uint64_t>(i));
  }
  // In fp32, with any bits of NaN.
  ZPP_HOST_DEVICE float applied(float value, uint32_t hash) const { return hash < threshold ? 0.0f : value * scale; }
};

}  // namespace megatron_zpp
