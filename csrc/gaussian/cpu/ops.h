// The CPU implementations of the operators: checks and the launch.
#pragma once

#include "../arguments.h"
#include "launchers.h"

namespace megatron_zpp::cpu {

inline void encode_gaussian(const at::Tensor& values, at::Tensor& payloads, int64_t bits, int64_t rounds, int64_t key) {
  const GaussianRows<uint8_t> rows = gaussian_to_encode(values, payloads, bits);
  const int some_rounds = checked_rounds(rounds);
  const Noise noise = noise_for(key);
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      launch_encode_gaussian<decltype(kBits)::value>(readable_values<decltype(zero)>(values), rows, some_rounds, noise);
    });
  });
}

inline void decode_gaussian(
    const at::Tensor& payloads, at::Tensor& values, int64_t bits, int64_t rounds, at::IntArrayRef keys, bool accumulate) {
  const GaussianRows<const uint8_t> rows = gaussian_to_decode(payloads, values, bits);
  const int some_rounds = checked_rounds(rounds);
  const SenderNoises senders{true, checked_keys(keys, values.size(0))};
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      launch_decode_gaussian<decltype(kBits)::value>(rows, writable_values<decltype(zero)>(values), some_rounds, senders, accumulate);
    });
  });
}

inline void decode_mean_gaussian(
    const at::Tensor& payloads, at::Tensor& mean, int64_t bits, int64_t rounds, at::IntArrayRef keys, bool accumulate) {
  const GaussianRows<const uint8_t> rows = gaussian_members(payloads, mean, bits);
  const int some_rounds = checked_rounds(rounds);
  const SenderNoises senders{false, checked_keys(keys, rows.rows.members)};
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    launch_decode_gaussian<decltype(kBits)::value>(rows, writable_values<float>(mean), some_rounds, senders, accumulate);
  });
}

}  // namespace megatron_zpp::cpu
