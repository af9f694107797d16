// Computes codes without a division per value, with the same bits as the division.
//
// ---- 16-bit values, rounded to the nearest
//
// Let m be the largest magnitude of a block, s = fl(m / Q) its scale, x one of its values. The code of x is rint(fl(x / s)), and x / s is
// nearly xQ/m.
//
// Near a half-integer k + 1/2, with k < Q, xQ/m is either equal to it or far from it: 2Qx = (2k+1)m is an equation between integers
// (times a power of two). For significands of up to 11 bits its sides are at most 254 * 2047, so unequal sides differ by a factor of at
// least 1 + 2^-19. Division errs by a factor of less than 1 + 2^-22, so only ties can depend on how it rounds.
//
// First case: Q does not divide the significand of m. At a tie, Q, a prime, divides 2k+1 < 2Q. Then 2k+1 = Q, so the only tie is
// |x| = m/2. Its code is (Q-1)/2 or (Q+1)/2, and one division per block tells which. Multiplying by fl(1/s) * (1 +- 2^-21) then gives every
// code of the block: all roundings together err by less than 1 + 2^-22, so the tie falls on the right side, and 1 + 2^-21 + 2^-22 moves no
// other quotient past a half-integer.
//
// Second case: Q divides the significand. Then s is exactly m/Q and there may be more ties. Such blocks divide.
//
// ---- fp32 values, with noise or without
//
// Ties may lie anywhere, but few values are near one. Let s be within the range of near_reciprocal (where products and quotients that underflow
// err by 2^-150, which is nothing beside what follows), q be fl(x / s), clamped to -Q to Q, and p be fl(x * fl(1/s)). |x| <= m, so |x / s|
// is at most Q * (1 + 1.01 * 2^-24). q is within 1.01 * Q * 2^-24 of x / s, and p within 2.01 * Q * 2^-24, so they differ by less than
// Q * 2^-22. With noise of at most 1/2 added, they are below 2Q, and rounding moves each by at most Q * 2^-23. So the two sums differ by less
// than Q * 2^-21. If that of p is at least so much nearer than 1/2 to an integer, that of q rounds to the same integer.
#pragma once

#include "block_format.h"

namespace megatron_zpp {

// Between these scales x, m/2, s, 1/s and their products are normal fp32 numbers, or so small beside s that the code is 0 either way.
constexpr float kSmallestReciprocalScale = 0x1p-100f;
constexpr float kLargestReciprocalScale = 0x1p+100f;

// A factor whose products with the values of a block may be used for quotients where they are sure; 0 if all have to be divided.
ZPP_HOST_DEVICE float near_reciprocal(float scale) {
  return scale >= kSmallestReciprocalScale && scale <= kLargestReciprocalScale ? 1.0f / scale : 0.0f;
}

// A factor f with rint(x * f) == rint(x / scale) for every value x of type T in the block, or 0 if the block has to divide.
template <class T, int kBits>
ZPP_HOST_DEVICE float exact_reciprocal(typename ValueFormat<T>::Magnitude largest, float scale) {
  static_assert(ValueFormat<T>::kSignificandBits <= 11, "the gap beside ties is proved for 16-bit values");
  constexpr int32_t kLargest = CodeFormat<kBits>::kLargest;
  const float maximum = ValueFormat<T>::widened(largest);
  const float code_of_half = static_cast<float>(static_cast<int32_t>(rounded(maximum * 0.5f / scale)));
  const float steer = code_of_half * 2.0f > static_cast<float>(kLargest) ? 1.0f + 0x1p-21f : 1.0f - 0x1p-21f;
  const bool scale_is_exact = static_cast<double>(scale) * kLargest == static_cast<double>(maximum);
  return scale_is_exact ? 0.0f : near_reciprocal(scale) * steer;
}

// A product with near_reciprocal, plus noise if there is any, is sure if it is no farther than this from the nearest integer.
template <int kBits>
constexpr float kSureDistance = 0.5f - static_cast<float>(CodeFormat<kBits>::kLargest) * 0x1p-21f;

}  // namespace megatron_zpp
