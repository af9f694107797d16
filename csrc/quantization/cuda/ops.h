// The CUDA implementations of the operators: checks, the current stream of the tensors' device, and the launch.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../arguments.h"
#include "launchers.h"
#include "torch_launch.h"

namespace megatron_zpp::cuda {

inline void encode_blocks(
    const at::Tensor& values, at::Tensor& payloads, int64_t bits, int64_t block_numel, bool rotated, std::optional<int64_t> noise_key) {
  check_same_device(values, payloads);
  const auto rows = rows_to_encode(values, payloads, bits, block_numel);
  const Noise noise = noise_for(noise_key);
  const c10::cuda::CUDAGuard guard(values.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      const auto source = readable_bits<decltype(zero)>(values);
      check_launch(launch_encode<decltype(kBits)::value>(source, rows, block_numel, rotated, noise, stream), "encode_blocks");
    });
  });
}

inline void decode_blocks(const at::Tensor& payloads, at::Tensor& values, int64_t bits, int64_t block_numel) {
  check_same_device(payloads, values);
  const auto rows = rows_to_decode(payloads, values, bits, block_numel);
  const c10::cuda::CUDAGuard guard(values.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      const auto target = writable_bits<decltype(zero)>(values);
      check_launch(launch_decode<decltype(kBits)::value>(rows, target, block_numel, stream), "decode_blocks");
    });
  });
}

inline void decode_mean_blocks(
    const at::Tensor& payloads, at::Tensor& mean, int64_t bits, int64_t block_numel, bool accumulate, bool rotated) {
  check_same_device(payloads, mean);
  const auto rows = members_to_decode(payloads, mean, bits, block_numel);
  const c10::cuda::CUDAGuard guard(mean.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_bits(bits, [&](auto kBits) {
    const auto target = writable_values<float>(mean);
    const cudaError_t error = launch_decode_mean<decltype(kBits)::value>(rows, target, block_numel, accumulate, rotated, stream);
    check_launch(error, "decode_mean_blocks");
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
  check_same_device(payloads, recoded);
  const auto rows = rows_to_recode(payloads, recoded, row_numel, bits, next_bits, block_numel);
  const Noise noise = noise_for(noise_key);
  const c10::cuda::CUDAGuard guard(recoded.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_bits(bits, [&](auto kBits) {
    dispatch_bits(next_bits, [&](auto kNextBits) {
      const cudaError_t error =
          launch_recode_mean<decltype(kBits)::value, decltype(kNextBits)::value>(rows.members, rows.recoded, block_numel, noise, stream);
      check_launch(error, "recode_mean_blocks");
    });
  });
}

}  // namespace megatron_zpp::cuda
