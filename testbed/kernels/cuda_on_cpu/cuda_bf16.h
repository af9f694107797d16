// A stand-in for CUDA's header: the one conversion that the kernels use, from its definition.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat162 {
  uint16_t x, y;
};

namespace cuda_on_cpu {

inline uint16_t rounded_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fff;  // what GPUs make of NaN
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace cuda_on_cpu

inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {cuda_on_cpu::rounded_to_bf16(low), cuda_on_cpu::rounded_to_bf16(high)};
}
