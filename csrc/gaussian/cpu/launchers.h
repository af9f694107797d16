// Starts the kernels on the threads of at::parallel_for, without torch's tensors. ../arguments.h has checked the arguments.
#pragma once

#include <vector>

#include "../format.h"

namespace megatron_zpp::cpu {

template <int kBits, class T>  // T: float, c10::BFloat16 or c10::Half
void launch_encode_gaussian(ValueRows<const T> values, GaussianRows<uint8_t> payloads, int rounds, const Noise& noise);

// noises: of each slice.
template <int kBits, class T>
void launch_decode_gaussian(
    GaussianRows<const uint8_t> payloads, ValueRows<T> values, int rounds, const std::vector<Noise>& noises, bool accumulate);

// noises: of each member.
template <int kBits>
void launch_decode_mean_gaussian(
    GaussianRows<const uint8_t> payloads, ValueRows<float> means, int rounds, const std::vector<Noise>& noises, bool accumulate);

}  // namespace megatron_zpp::cpu
