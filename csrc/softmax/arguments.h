// Checks the arguments of softmax_parts and softmax_gradient, so that every access is in bounds. megatron_zpp/ops/softmax.py has better
// messages for users.
#pragma once

#include <ATen/core/Tensor.h>

#include "../quantization/arguments.h"
#include "rows.h"

namespace megatron_zpp {

inline void check_of_tokens(const at::Tensor& numbers, const char* name, at::ScalarType type, const at::Tensor& logits) {
  TORCH_CHECK(numbers.scalar_type() == type, name, " must be ", type, ", not ", numbers.scalar_type());
  const bool is_one_each = numbers.dim() == 1 && numbers.size(0) == logits.size(0) && numbers.is_contiguous();
  TORCH_CHECK(is_one_each, name, " must be contiguous with one number for each of ", logits.size(0), " tokens, not ", numbers.sizes());
  TORCH_CHECK(numbers.device() == logits.device(), "tensors must be on one device, not on ", numbers.device(), " and ", logits.device());
}

inline void check_logits(const at::Tensor& logits, const at::Tensor& labels, int64_t first, const char* name) {
  check_values(logits, name);
  TORCH_CHECK(logits.size(1) > 0, name, " must have columns, and the softmax of none is not defined");
  TORCH_CHECK(first >= 0, "first must be at least 0, not ", first);
  check_of_tokens(labels, "labels", at::kLong, logits);
}

inline void check_softmax_parts(
    const at::Tensor& logits,
    const at::Tensor& labels,
    int64_t first,
    int64_t entries,
    const at::Tensor& largest,
    const at::Tensor& sums,
    const at::Tensor& label) {
  check_logits(logits, labels, first, "logits");
  const bool has_columns = entries >= logits.size(1) && first <= entries - logits.size(1);
  TORCH_CHECK(has_columns, "entries must be at least ", first, " + ", logits.size(1), ", not ", entries);
  check_of_tokens(largest, "largest", at::kFloat, logits);
  check_of_tokens(sums, "sums", at::kFloat, logits);
  check_of_tokens(label, "label", at::kFloat, logits);
}

inline void check_softmax_gradient(
    const at::Tensor& logits,
    const at::Tensor& labels,
    int64_t first,
    const at::Tensor& largest,
    const at::Tensor& sums,
    const at::Tensor& grad_loss,
    const at::Tensor& gradient) {
  check_logits(logits, labels, first, "logits");
  check_of_tokens(largest, "largest", at::kFloat, logits);
  check_of_tokens(sums, "sums", at::kFloat, logits);
  check_of_tokens(grad_loss, "grad_loss", at::kFloat, logits);
  check_values(gradient, "gradient");
  const bool is_alike = gradient.scalar_type() == logits.scalar_type() && gradient.sizes() == logits.sizes();
  TORCH_CHECK(is_alike, "gradient is ", gradient.scalar_type(), " ", gradient.sizes(), "; expected that of logits, ", logits.sizes());
  TORCH_CHECK(gradient.device() == logits.device(), "tensors must be on one device, not on ", gradient.device(), " and ", logits.device());
}

}  // namespace megatron_zpp
