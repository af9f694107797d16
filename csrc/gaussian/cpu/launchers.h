// Starts the kernels on the threads of at::parallel_for, without torch's tensors. ../arguments.h has checked the arguments.
#pragma once

#include <vector>

#include "../format.h"

namespace megatron_zpp::cpu {

template <int kBits, class T>  // T: float, c10::BFloat16 or c10::Half
void launch_encode_gaussian(ValueRows<const T> values, GaussianRows<uint8_t> payloads, int rounds, const Noise& noise);

// What the signs of each sender are drawn from.
struct SenderNoises {
  bool is_by_slice;  // whether each slice has a sender, or each member
  std::vector<Noise> noises;
};

// Decodes the mean over members.
template <int kBits, class T>
void launch_decode_gaussian(
    GaussianRows<const uint8_t> payloads, ValueRows<T> means, int rounds, const SenderNoises& senders, bool accumulate);

}  // namespace megatron_zpp::cpu
