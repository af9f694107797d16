// A stand-in for CUDA's header: the two conversions that the kernels use, by way of torch's.
#pragma once

#include <c10/util/Half.h>

#include <cstdint>

#include "cuda_runtime.h"

struct __half2 {
  uint16_t x, y;
};

namespace cuda_on_cpu {

inline uint16_t rounded_to_fp16(float value) {
  return value != value ? 0x7fff : c10::Half(value).x;  // what GPUs make of NaN
}

inline float widened_fp16(uint16_t bits) { return static_cast<float>(c10::Half(bits, c10::Half::from_bits())); }

}  // namespace cuda_on_cpu

inline __half2 __floats2half2_rn(float low, float high) { return {cuda_on_cpu::rounded_to_fp16(low), cuda_on_cpu::rounded_to_fp16(high)}; }

inline float2 __half22float2(__half2 pair) { return {cuda_on_cpu::widened_fp16(pair.x), cuda_on_cpu::widened_fp16(pair.y)}; }
