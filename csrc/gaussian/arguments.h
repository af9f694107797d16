// Checks the arguments of the operators, so that every access is in bounds, and converts them to rows.
// megatron_zpp/ops/gaussian.py makes the same checks and more for users, with better messages.
#pragma once

#include <vector>

#include "../quantization/arguments.h"
#include "format.h"

namespace megatron_zpp {

inline RowLayout gaussian_layout(int64_t row_numel, int64_t bits) {
  TORCH_CHECK(bits >= 1 && bits <= 4, "bits must be 1, 2, 3 or 4, not ", bits);
  const bool is_whole = row_numel >= 0 && row_numel % kGaussianNumel == 0;
  TORCH_CHECK(is_whole, "a row must have a multiple of ", kGaussianNumel, " values, not ", row_numel);
  const int64_t blocks = row_numel / kGaussianNumel;
  return {blocks, 0, planes_offset(blocks) + blocks * bits * kPlaneBytes};
}

inline int checked_rounds(int64_t rounds) {
  TORCH_CHECK(rounds == 1 || rounds == kMostRounds, "rounds must be 1 or ", kMostRounds, ", not ", rounds);
  return static_cast<int>(rounds);
}

// One noise per key. needed: the number of slices or members.
inline std::vector<Noise> checked_keys(at::IntArrayRef keys, int64_t needed) {
  TORCH_CHECK(static_cast<int64_t>(keys.size()) == needed, "keys must be ", needed, ", not ", keys.size());
  std::vector<Noise> noises;
  noises.reserve(keys.size());
  for (const int64_t key : keys) {
    noises.push_back(noise_for(key));
  }
  return noises;
}

// The rows that each operator reads and writes, on any device.

inline GaussianRows<uint8_t> gaussian_to_encode(const at::Tensor& values, at::Tensor& payloads, int64_t bits) {
  check_values(values, "values");
  return {writable_payloads(payloads, "payloads", values.size(0), gaussian_layout(values.size(1), bits))};
}

inline GaussianRows<const uint8_t> gaussian_to_decode(const at::Tensor& payloads, const at::Tensor& values, int64_t bits) {
  check_values(values, "values");
  return {readable_payloads(payloads, "payloads", values.size(0), gaussian_layout(values.size(1), bits))};
}

inline GaussianRows<const uint8_t> gaussian_members(const at::Tensor& payloads, const at::Tensor& mean, int64_t bits) {
  check_values(mean, "mean");
  check_is_float(mean, "mean");
  return {readable_members(payloads, "payloads", mean.size(0), gaussian_layout(mean.size(1), bits))};
}

// Calls launch with the bits as a compile-time constant.
template <class Launch>
void dispatch_gaussian_bits(int64_t bits, Launch launch) {
  switch (bits) {
    case 1:
      return launch(std::integral_constant<int, 1>());
    case 2:
      return launch(std::integral_constant<int, 2>());
    case 3:
      return launch(std::integral_constant<int, 3>());
    case 4:
      return launch(std::integral_constant<int, 4>());
    default:
      TORCH_CHECK(false, "bits must be 1, 2, 3 or 4, not ", bits);
  }
}

}  // namespace megatron_zpp
