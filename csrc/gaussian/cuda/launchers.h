// Starts the kernels on a stream, without torch. ../arguments.h has checked the arguments; pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include "../format.h"

namespace megatron_zpp::cuda {

constexpr int kMostSenders = 256;  // of a launch: arguments of kernels have room for few thousand bytes

// What the signs of each sender are drawn from.
struct SenderNoises {
  bool is_by_slice;  // whether each slice has a sender, or each member
  uint32_t words[2 * kMostSenders];

  ZPP_HOST_DEVICE Noise at(int64_t sender) const { return {true, words[2 * sender], words[2 * sender + 1]}; }
};

template <int kBits, class T>  // T: float, Bf16Bits or Fp16Bits
cudaError_t launch_encode_gaussian(ValueRows<const T> values, GaussianRows<uint8_t> payloads, int rounds, Noise noise, cudaStream_t stream);

// Decodes the sum over members, and what was summed `before` if it has a base, divided by `divisor`.
template <int kBits, class T>
cudaError_t launch_decode_gaussian(
    GaussianRows<const uint8_t> payloads,
    ValueRows<T> means,
    int rounds,
    const SenderNoises& noises,
    ValueRows<const float> before,
    int64_t divisor,
    bool accumulate,
    cudaStream_t stream);

}  // namespace megatron_zpp::cuda
