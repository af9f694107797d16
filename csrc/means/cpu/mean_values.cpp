// mean_values on CPUs.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../../quantization/cpu/mean_block.h"
#include "../arguments.h"
#include "sum_run.h"

namespace megatron_zpp::cpu {
namespace {

constexpr int64_t kThreadParts = 16;  // of kPartNumel values; for fewer it does not pay to wake a thread

template <class T, class Stored>
void take_mean(const MemberRows<T>& members, const ValueRows<Stored>& means, bool accumulate) {
  const int64_t parts = (members.run_numel + kPartNumel - 1) / kPartNumel;
  at::parallel_for(0, members.slices * parts, kThreadParts, [&](int64_t begin, int64_t end) {
    float total[kPartNumel];
    for (int64_t index = begin; index < end; ++index) {
      const int64_t slice = index / parts, first = index % parts * kPartNumel;
      const int64_t numel = std::min(kPartNumel, members.run_numel - first);
      std::fill(total, total + numel, -0.0f);  // -0 + x is x, also for x = -0
      for (int64_t member = 0; member < members.members; ++member) {
        add_run(members.run(member, slice) + first, numel, total);
      }
      divide_block(total, numel, members.members);
      store_run(total, numel, accumulate, means.run(slice) + first);
    }
  });
}

void mean_values(const at::Tensor& members, at::Tensor& mean, bool accumulate) {
  check_mean_tensors(members, mean, accumulate);
  dispatch_means(members, mean, [&](auto zero, auto stored_zero) {
    using T = decltype(zero);
    const MemberRows<T> rows{
        members.const_data_ptr<T>(), members.stride(0), members.stride(1), members.size(0), members.size(1), members.size(2)};
    take_mean(rows, writable_values<decltype(stored_zero)>(mean), accumulate);
  });
}

}  // namespace
}  // namespace megatron_zpp::cpu

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) { m.impl("mean_values", megatron_zpp::cpu::mean_values); }
