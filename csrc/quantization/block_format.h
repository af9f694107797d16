// The format of quantized blocks: computes a block's scale, its codes and their bytes from its values.
// One definition for host and device. A payload row holds blocks, and after them bytes of the caller:
//
//     | codes, padded to 16 bytes | scales fp32, padded to 16 bytes | bytes that no kernel touches |
//
// Bit-equality with megatron_zpp/ops/reference.py needs IEEE fp32: no contraction (-ffp-contract=off, --fmad=false), no fast-math,
// subnormals kept. This file does not include torch, so that GPU kernels compile without it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ZPP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZPP_HOST_DEVICE inline
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads and pairs of 16-bit values are read as little-endian words"
#endif

namespace megatron_zpp {

constexpr int64_t kPartAlignmentBytes = 16;   // of codes and of scales: the widest access of a GPU thread
constexpr int64_t kBlockNumelMultiple = 32;   // one warp; 16 bytes of 4-bit codes
constexpr uint32_t kNanScaleBits = 0x7fc00000;
constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: floats there are 1 apart, so adding it rounds to an integer, half to even
constexpr uint32_t kRoundingShiftBits = 0x4b400000;

ZPP_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

ZPP_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Gives NaN the same bits on every processor.
ZPP_HOST_DEVICE float with_canonical_nan(float value) { return value != value ? float_of(kNanScaleBits) : value; }

// ---- Layout of a payload row -----------------------------------------------------------------------------------------------------------

struct RowLayout {
  int64_t blocks;         // of one row
  int64_t scales_offset;  // bytes
  int64_t coded_bytes;    // codes and scales
};

ZPP_HOST_DEVICE constexpr int64_t padded_bytes(int64_t bytes) {
  return (bytes + kPartAlignmentBytes - 1) / kPartAlignmentBytes * kPartAlignmentBytes;
}

ZPP_HOST_DEVICE constexpr RowLayout row_layout(int64_t row_numel, int64_t bits, int64_t block_numel) {
  const int64_t blocks = row_numel / block_numel;
  const int64_t scales_offset = padded_bytes(row_numel / 8 * bits);
  return {blocks, scales_offset, scales_offset + padded_bytes(blocks * static_cast<int64_t>(sizeof(float)))};
}

// ---- Values ----------------------------------------------------------------------------------------------------------------------------

// 16-bit values as their bits.
struct Bf16Bits {
  uint16_t bits;
};
struct Fp16Bits {
  uint16_t bits;
};

// Magnitude: the bits without the sign. As integers they have the order of the absolute values, with infinity and then NaN above all
// others. So an integer maximum finds the largest value or a non-finite one, in any order of comparison.
template <class T>
struct ValueFormat;

template <>
struct ValueFormat<float> {
  using Magnitude = uint32_t;
  static constexpr Magnitude kInfinity = 0x7f800000;
  static constexpr int kSignificandBits = 24;
  ZPP_HOST_DEVICE static Magnitude magnitude(float value) { return bits_of(value) & 0x7fffffffu; }
  ZPP_HOST_DEVICE static float widened(Magnitude magnitude) { return float_of(magnitude); }
};

template <>
struct ValueFormat<Bf16Bits> {
  using Magnitude = uint16_t;
  static constexpr Magnitude kInfinity = 0x7f80;
  static constexpr uint16_t kNan = 0x7fc0;
  static constexpr int kSignificandBits = 8;
  ZPP_HOST_DEVICE static Magnitude magnitude(Bf16Bits value) { return value.bits & 0x7fffu; }
  ZPP_HOST_DEVICE static float widened(Magnitude magnitude) { return float_of(static_cast<uint32_t>(magnitude) << 16); }
};

template <>
struct ValueFormat<Fp16Bits> {
  using Magnitude = uint16_t;
  static constexpr Magnitude kInfinity = 0x7c00;
  static constexpr uint16_t kNan = 0x7e00;
  static constexpr int kSignificandBits = 11;
  ZPP_HOST_DEVICE static Magnitude magnitude(Fp16Bits value) { return value.bits & 0x7fffu; }
  // For finite magnitudes. Shifted to their place in fp32, exponents are 112 too small, also for subnormals; multiplying by 2^112 is exact.
  ZPP_HOST_DEVICE static float widened(Magnitude magnitude) { return float_of(static_cast<uint32_t>(magnitude) << 13) * 0x1p+112f; }
};

// The bits of the nearest bf16, half to even; not for NaN.
ZPP_HOST_DEVICE uint32_t nearest_bf16(float value) {
  const uint32_t bits = bits_of(value);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// The same, also for NaN, which gets its one bits.
ZPP_HOST_DEVICE uint16_t narrowed_to_bf16(float value) {
  return static_cast<uint16_t>(value != value ? ValueFormat<Bf16Bits>::kNan : nearest_bf16(value));
}

// ---- Scales and codes ------------------------------------------------------------------------------------------------------------------

template <int kBits>
struct CodeFormat {
  static_assert(kBits == 4 || kBits == 8, "codes have 4 or 8 bits");
  static constexpr int32_t kLargest = (1 << (kBits - 1)) - 1;  // Q: codes are symmetric, -Q to Q
};

// The scale of a block: NaN if a value is not finite, 0 if all are 0 or the quotient underflows.
template <class T, int kBits>
ZPP_HOST_DEVICE float block_scale(typename ValueFormat<T>::Magnitude largest) {
  if (largest >= ValueFormat<T>::kInfinity) {
    return float_of(kNanScaleBits);
  }
  return ValueFormat<T>::widened(largest) / static_cast<float>(CodeFormat<kBits>::kLargest);
}

// Whether a block with this scale has codes other than 0.
ZPP_HOST_DEVICE bool has_codes(float scale) { return scale > 0.0f; }

// An integer whose low bits are the two's complement code nearest to the quotient, half to even; exact for |quotient| < 2^22.
ZPP_HOST_DEVICE uint32_t rounded(float quotient) { return bits_of(quotient + kRoundingShift) - kRoundingShiftBits; }

// A subnormal scale is too coarse to keep quotients within -Q to Q, and any scale is rounded, hence the clamp.
template <int kBits>
ZPP_HOST_DEVICE float clamped_quotient(float value, float scale) {
  constexpr float kLargest = static_cast<float>(CodeFormat<kBits>::kLargest);
  float quotient = value / scale;
  quotient = quotient > kLargest ? kLargest : quotient;
  quotient = quotient < -kLargest ? -kLargest : quotient;
  return quotient;
}

// The code of a value in a block that has codes.
template <int kBits>
ZPP_HOST_DEVICE uint32_t code_of(float value, float scale) {
  return rounded(clamped_quotient<kBits>(value, scale));
}

ZPP_HOST_DEVICE float decoded(int32_t code, float scale) { return static_cast<float>(code) * scale; }

// ---- Bytes of codes --------------------------------------------------------------------------------------------------------------------

// Two neighbouring codes: two bytes, or the low and the high nibble of one.
struct CodePair {
  int32_t even;
  int32_t odd;
};

template <int kBits>
ZPP_HOST_DEVICE void store_pair(uint8_t* codes, int64_t pair, uint32_t even, uint32_t odd) {
  if constexpr (kBits == 8) {
    const uint16_t word = static_cast<uint16_t>((even & 0xffu) | (odd << 8));
    memcpy(codes + 2 * pair, &word, sizeof(word));
  } else {
    codes[pair] = static_cast<uint8_t>((even & 0xfu) | ((odd & 0xfu) << 4));
  }
}

template <int kBits>
ZPP_HOST_DEVICE CodePair load_pair(const uint8_t* codes, int64_t pair) {
  if constexpr (kBits == 8) {
    uint16_t word;
    memcpy(&word, codes + 2 * pair, sizeof(word));
    return {static_cast<int8_t>(word & 0xffu), static_cast<int16_t>(word) >> 8};
  } else {
    const uint8_t byte = codes[pair];
    return {((byte & 0xf) ^ 8) - 8, static_cast<int8_t>(byte) >> 4};
  }
}

}  // namespace megatron_zpp
