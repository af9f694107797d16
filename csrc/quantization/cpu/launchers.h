// Starts the kernels on the threads of at::parallel_for, without torch's tensors. ../arguments.h has checked the arguments.
#pragma once

#include "../noise.h"
#include "../rows.h"

namespace megatron_zpp::cpu {

template <int kBits, class T>  // T: float, c10::BFloat16 or c10::Half
void launch_encode(ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, bool rotated, const Noise& noise);

template <int kBits, class T>
void launch_decode(PayloadRows<const uint8_t> payloads, ValueRows<T> values, int64_t block_numel);

template <int kBits>
void launch_decode_mean(
    PayloadRows<const uint8_t> payloads, ValueRows<float> means, int64_t block_numel, bool accumulate, bool rotated);

template <int kBits, int kNextBits>
void launch_recode_mean(
    PayloadRows<const uint8_t> payloads, PayloadRows<uint8_t> recoded, int64_t block_numel, const Noise& noise);

}  // namespace megatron_zpp::cpu
