// The CUDA implementations of the loss: checks, the current stream of the tensors' device, and the launch.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../../quantization/cuda/torch_launch.h"
#include "../arguments.h"
#include "launchers.h"

namespace megatron_zpp::cuda {

template <class T>
LogitRows<typename Bits<T>::Type> logit_rows(const at::Tensor& logits, const at::Tensor& labels, int64_t first, int64_t entries) {
  return {readable_bits<T>(logits), labels.const_data_ptr<int64_t>(), logits.size(0), logits.size(1), first, entries};
}

inline void softmax_parts(
    const at::Tensor& logits,
    const at::Tensor& labels,
    int64_t first,
    int64_t entries,
    at::Tensor& largest,
    at::Tensor& sums,
    at::Tensor& label) {
  check_softmax_parts(logits, labels, first, entries, largest, sums, label);
  const c10::cuda::CUDAGuard guard(logits.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const TokenSums<float> written{largest.mutable_data_ptr<float>(), sums.mutable_data_ptr<float>()};
  dispatch_values(logits, "logits", [&](auto zero) {
    const auto rows = logit_rows<decltype(zero)>(logits, labels, first, entries);
    check_launch(launch_softmax_parts(rows, written, label.mutable_data_ptr<float>(), stream), "softmax_parts");
  });
}

inline void softmax_gradient(
    const at::Tensor& logits,
    const at::Tensor& labels,
    int64_t first,
    const at::Tensor& largest,
    const at::Tensor& sums,
    const at::Tensor& grad_loss,
    at::Tensor& gradient) {
  check_softmax_gradient(logits, labels, first, largest, sums, grad_loss, gradient);
  const c10::cuda::CUDAGuard guard(logits.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const TokenSums<const float> read{largest.const_data_ptr<float>(), sums.const_data_ptr<float>()};
  dispatch_values(logits, "logits", [&](auto zero) {
    using T = decltype(zero);
    const auto rows = logit_rows<T>(logits, labels, first, first + logits.size(1));
    const cudaError_t error = launch_softmax_gradient(rows, read, grad_loss.const_data_ptr<float>(), writable_bits<T>(gradient), stream);
    check_launch(error, "softmax_gradient");
  });
}

}  // namespace megatron_zpp::cuda
