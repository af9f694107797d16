// Starts the kernels on a stream, without torch. ../arguments.h has checked the arguments; pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include "../noise.h"
#include "../rows.h"

namespace megatron_zpp::cuda {

template <int kBits, class T>  // T: float, Bf16Bits or Fp16Bits
cudaError_t launch_encode(
    ValueRows<const T> values, PayloadRows<uint8_t> payloads, int64_t block_numel, bool rotated, Noise noise, cudaStream_t stream);

template <int kBits, class T>
cudaError_t launch_decode(PayloadRows<const uint8_t> payloads, ValueRows<T> values, int64_t block_numel, cudaStream_t stream);

template <int kBits>
cudaError_t launch_decode_mean(
    PayloadRows<const uint8_t> payloads, ValueRows<float> means, int64_t block_numel, bool accumulate, bool rotated, cudaStream_t stream);

template <int kBits, int kNextBits>
cudaError_t launch_recode_mean(
    PayloadRows<const uint8_t> payloads, PayloadRows<uint8_t> recoded, int64_t block_numel, Noise noise, cudaStream_t stream);

}  // namespace megatron_zpp::cuda
