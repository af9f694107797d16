// drop_values on CPUs.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../../quantization/arguments.h"
#include "../arguments.h"
#include "drop_run.h"

namespace megatron_zpp::cpu {
namespace {

constexpr int64_t kThreadValues = 1 << 15;  // for fewer it does not pay to wake a thread

void drop_values(const at::Tensor& values, at::Tensor& dropped, int64_t key, int64_t first_index, int64_t threshold, double scale) {
  check_dropout_tensors(values, dropped);
  const Mask mask = mask_of(key, first_index, threshold, scale);
  dispatch_values(values, "values", [&](auto zero) {
    using T = decltype(zero);
    const T* source = values.const_data_ptr<T>();
    T* target = dropped.mutable_data_ptr<T>();
    at::parallel_for(0, values.numel(), kThreadValues, [&](int64_t begin, int64_t end) { drop_range(source, begin, end, mask, target); });
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { m.impl("drop_values", megatron_zpp::cpu::drop_values); }
