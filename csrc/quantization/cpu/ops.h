// The CPU implementations of the operators: checks and the launch.
#pragma once

#include "../arguments.h"
#include "launchers.h"

namespace megatron_zpp::cpu {

inline void encode_blocks(
    const at::Tensor& values, at::Tensor& payloads, int64_t bits, int64_t block_numel, bool rotated, std::optional<int64_t> noise_key) {
  const auto rows = rows_to_encode(values, payloads, bits, block_numel);
  const Noise noise = noise_for(noise_key);
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      launch_encode<decltype(kBits)::value>(readable_values<decltype(zero)>(values), rows, block_numel, rotated, noise);
    });
  });
}

inline void decode_blocks(const at::Tensor& payloads, at::Tensor& values, int64_t bits, int64_t block_numel) {
  const auto rows = rows_to_decode(payloads, values, bits, block_numel);
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      launch_decode<decltype(kBits)::value>(rows, writable_values<decltype(zero)>(values), block_numel);
    });
  });
}

inline void decode_mean_blocks(
    const at::Tensor& payloads, at::Tensor& mean, int64_t bits, int64_t block_numel, bool accumulate, bool rotated) {
  const auto rows = members_to_decode(payloads, mean, bits, block_numel);
  dispatch_bits(bits, [&](auto kBits) {
    launch_decode_mean<decltype(kBits)::value>(rows, writable_values<float>(mean), block_numel, accumulate, rotated);
  });
}

inline void recode_mean_blocks(
    const at::Tensor& payloads,
    at::Tensor& recoded,
    int64_t row_numel,
    int64_t bits,
    int64_t next_bits,
    int64_t block_numel,
    std::optional<int64_t> noise_key) {
  const auto rows = rows_to_recode(payloads, recoded, row_numel, bits, next_bits, block_numel);
  const Noise noise = noise_for(noise_key);
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_bits(next_bits, [&](auto kNextBits) {
      launch_recode_mean<decltype(kBits)::value, decltype(kNextBits)::value>(rows.members, rows.recoded, block_numel, noise);
    });
  });
}

}  // namespace megatron_zpp::cpu
