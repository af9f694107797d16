// The formats of torch's 16-bit values.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../block_format.h"

namespace megatron_zpp {

template <>
struct ValueFormat<c10::BFloat16> : ValueFormat<Bf16Bits> {
  static Magnitude magnitude(c10::BFloat16 value) { return value.x & 0x7fffu; }
};

template <>
struct ValueFormat<c10::Half> : ValueFormat<Fp16Bits> {
  static Magnitude magnitude(c10::Half value) { return value.x & 0x7fffu; }
};

}  // namespace megatron_zpp
