// Checks the arguments of mean_values, so that every access is in bounds. megatron_zpp/ops/means.py has better messages for users.
#pragma once

#include <ATen/core/Tensor.h>

#include "../quantization/arguments.h"
#include "rows.h"

namespace megatron_zpp {

inline void check_mean_tensors(const at::Tensor& members, const at::Tensor& mean, bool accumulate) {
  TORCH_CHECK(members.dim() == 3, "members must have 3 dims, [members, slices, numel], not ", members.dim());
  TORCH_CHECK(members.size(0) > 0, "members has no members, and the mean of none is not defined");
  check_values(mean, "mean");
  check_inner_dim(members, "members");
  const bool is_as_large = members.size(1) == mean.size(0) && members.size(2) == mean.size(1);
  TORCH_CHECK(is_as_large, "mean has shape ", mean.sizes(), "; expected that of one of the members, of shape ", members.sizes());
  const bool is_wide = mean.scalar_type() == at::kFloat;
  TORCH_CHECK(is_wide || mean.scalar_type() == members.scalar_type(), "mean must be float32 or as members, not ", mean.scalar_type());
  TORCH_CHECK(is_wide || !accumulate, "a mean is added to float32 only, not to ", mean.scalar_type());
  TORCH_CHECK(members.device() == mean.device(), "tensors must be on one device, not on ", members.device(), " and ", mean.device());
}

// Calls launch with a value of the C++ type of members, and with one of the type of mean: the same, or float.
template <class Launch>
void dispatch_means(const at::Tensor& members, const at::Tensor& mean, Launch launch) {
  dispatch_values(members, "members", [&](auto zero) {
    if (mean.scalar_type() == at::kFloat) {
      launch(zero, float());
    } else {
      launch(zero, zero);
    }
  });
}

}  // namespace megatron_zpp
