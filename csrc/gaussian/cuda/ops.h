// The CUDA implementations of the operators: checks, the current stream of the tensors' device, and the launch.
#pragma once

#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../../quantization/cuda/torch_launch.h"
#include "../arguments.h"
#include "launchers.h"

namespace megatron_zpp::cuda {

// Neighbouring senders, whose messages one launch decodes.
struct SenderGroup {
  int64_t first;
  int64_t count;
  SenderNoises noises;
};

// is_by_slice: whether `needed` counts slices, or members.
inline std::vector<SenderGroup> sender_groups(at::IntArrayRef keys, int64_t needed, bool is_by_slice) {
  const std::vector<Noise> noises = checked_keys(keys, needed);
  std::vector<SenderGroup> groups;
  for (int64_t first = 0; first < needed; first += kMostSenders) {
    SenderGroup group{first, std::min<int64_t>(kMostSenders, needed - first), {}};
    group.noises.is_by_slice = is_by_slice;
    for (int64_t i = 0; i < group.count; ++i) {
      group.noises.words[2 * i] = noises[first + i].first_word;
      group.noises.words[2 * i + 1] = noises[first + i].second_word;
    }
    groups.push_back(group);
  }
  return groups;
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
  const std::vector<SenderGroup> groups = sender_groups(keys, values.size(0), true);
  const c10::cuda::CUDAGuard guard(values.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    dispatch_values(values, "values", [&](auto zero) {
      for (const SenderGroup& group : groups) {
        const GaussianRows<const uint8_t> some_rows = {rows.rows.some_slices(group.first, group.count)};
        const auto target = writable_bits<decltype(zero)>(values).from(group.first);
        const cudaError_t error =
            launch_decode_gaussian<decltype(kBits)::value>(some_rows, target, some_rounds, group.noises, {}, 1, accumulate, stream);
        check_launch(error, "decode_gaussian");
      }
    });
  });
}

inline void decode_mean_gaussian(
    const at::Tensor& payloads, at::Tensor& mean, int64_t bits, int64_t rounds, at::IntArrayRef keys, bool accumulate) {
  check_same_device(payloads, mean);
  const GaussianRows<const uint8_t> rows = gaussian_members(payloads, mean, bits);
  const int some_rounds = checked_rounds(rounds);
  const int64_t members = rows.rows.members;
  const std::vector<SenderGroup> groups = sender_groups(keys, members, false);
  const c10::cuda::CUDAGuard guard(mean.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const bool needs_room = accumulate && groups.size() > 1;  // else a mean has room for its sums
  const at::Tensor room = needs_room ? at::empty_like(mean) : mean;
  const auto means = writable_values<float>(mean), sums = writable_values<float>(room);
  dispatch_gaussian_bits(bits, [&](auto kBits) {
    for (const SenderGroup& group : groups) {
      const bool is_first = group.first == 0, is_last = group.first + group.count == members;
      const cudaError_t error = launch_decode_gaussian<decltype(kBits)::value>(
          GaussianRows<const uint8_t>{rows.rows.some_members(group.first, group.count)},
          is_last ? means : sums,
          some_rounds,
          group.noises,
          is_first ? ValueRows<const float>{} : ValueRows<const float>{sums.base, sums.slice_stride},
          is_last ? members : 1,
          is_last && accumulate,
          stream);
      check_launch(error, "decode_mean_gaussian");
    }
  });
}

}  // namespace megatron_zpp::cuda
