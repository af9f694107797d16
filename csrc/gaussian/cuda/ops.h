// The CUDA implementations of the operators: checks, the current stream of the tensors' device, and the launch.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../../quantization/cuda/torch_launch.h"
#include "../arguments.h"
#include "launchers.h"

namespace megatron_zpp::cuda {

// is_by_slice: whether `needed` counts slices, or members.
inline SenderNoises sender_noises(at::IntArrayRef keys, int64_t needed, bool is_by_slice) {
  const std::vector<Noise> noises = checked_keys(keys, needed);
  TORCH_CHECK(needed <= kMostSenders, "GPUs decode messages of at most ", kMostSenders, " senders at a time, not of ", needed);
  SenderNoises senders{};
  senders.is_by_slice = is_by_slice;
  for (int64_t i = 0; i < needed; ++i) {
    senders.words[2 * i] = noises[i].first_word;
    senders.words[2 * i + 1] = noises[i].second_word;
  }
  return senders;
}

inline void encode_gaussian(const at::Tensor& values, at::Tensor& payloads, int64_t bits, int64_t rounds, int64_t key) {
  check_same_device(values, payloads);
  const GaussianRows<uint8_t> rows = gaussian_to_encode(values, payloads, bits);
  const int some_rounds = checked_rounds(rounds);
  const Noise noise = noise_for(key);
  const c10::cuda::CUDAGuard guard(values.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      const auto source = readable_bits<decltype(zero)>(values);
      check_launch(launch_encode_gaussian<decltype(kBits)::value>(source, rows, some_rounds, noise, stream), "encode_gaussian");
    });
  });
}

inline void decode_gaussian(
    const at::Tensor& payloads, at::Tensor& values, int64_t bits, int64_t rounds, at::IntArrayRef keys, bool accumulate) {
  check_same_device(payloads, values);
  const GaussianRows<const uint8_t> rows = gaussian_to_decode(payloads, values, bits);
  const int some_rounds = checked_rounds(rounds);
  const SenderNoises noises = sender_noises(keys, values.size(0), true);
  const c10::cuda::CUDAGuard guard(values.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      const auto target = writable_bits<decltype(zero)>(values);
      const cudaError_t error = launch_decode_gaussian<decltype(kBits)::value>(rows, target, some_rounds, noises, accumulate, stream);
      check_launch(error, "decode_gaussian");
    });
  });
}

inline void decode_mean_gaussian(
    const at::Tensor& payloads, at::Tensor& mean, int64_t bits, int64_t rounds, at::IntArrayRef keys, bool accumulate) {
  check_same_device(payloads, mean);
  const GaussianRows<const uint8_t> rows = gaussian_members(payloads, mean, bits);
  const int some_rounds = checked_rounds(rounds);
  const SenderNoises noises = sender_noises(keys, rows.rows.members, false);
  const c10::cuda::CUDAGuard guard(mean.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    const auto target = writable_values<float>(mean);
    const cudaError_t error = launch_decode_gaussian<decltype(kBits)::value>(rows, target, some_rounds, noises, accumulate, stream);
    check_launch(error, "decode_mean_gaussian");
  });
}

}  // namespace megatron_zpp::cuda
