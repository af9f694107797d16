// Checks the arguments of drop_values, so that every access is in bounds. megatron_zpp/ops/dropout.py makes tensors that pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>

#include "mask.h"

namespace megatron_zpp {

inline void check_dropout_tensors(const at::Tensor& values, const at::Tensor& dropped) {
  TORCH_CHECK(values.is_contiguous() && dropped.is_contiguous(), "values or dropped is strided; expected contiguous tensors");
  TORCH_CHECK(values.numel() == dropped.numel(), "dropped has ", dropped.numel(), " elements; expected ", values.numel(), ", as values");
  TORCH_CHECK(values.scalar_type() == dropped.scalar_type(), "dropped is ", dropped.scalar_type(), "; expected ", values.scalar_type());
  TORCH_CHECK(values.device() == dropped.device(), "tensors are on ", values.device(), " and ", dropped.device(), "; expected one device");
}

inline Mask mask_of(int64_t key, int64_t first_index, int64_t threshold, double scale) {
  TORCH_CHECK(key >= 0, "key is ", key, "; expected one from 0 on");
  TORCH_CHECK(first_index >= 0, "first_index is ", first_index, "; expected one from 0 on");
  const bool is_word = threshold >= 0 && threshold <= std::numeric_limits<uint32_t>::max();
  TORCH_CHECK(is_word, "threshold is ", threshold, "; expected 0 to 2^32 - 1");
  return {
      noise_of(static_cast<uint64_t>(key)),
      static_cast<uint64_t>(first_index),
      static_cast<uint32_t>(threshold),
      static_cast<float>(scale)};
}

}  // namespace megatron_zpp
