// mean_values on CPUs.
#include <ATen/Parallel.h>

#include "../../quantization/cpu/mean_block.h"
#include "launcher.h"
#include "sum_run.h"

namespace megatron_zpp::cpu {
namespace {

constexpr int64_t kThreadParts = 16;  // of kPartNumel values; for fewer it does not pay to wake a thread

}  // namespace

template <class T, class Stored>
void launch_mean(const MemberRows<T>& members, const ValueRows<Stored>& means, bool accumulate) {
  const int64_t parts = (members.row_numel + kPartNumel - 1) / kPartNumel;
  at::parallel_for(0, members.slices * parts, kThreadParts, [&](int64_t begin, int64_t end) {
    float total[kPartNumel];
    for (int64_t index = begin; index < end; ++index) {
      const int64_t slice = index / parts, first = index % parts * kPartNumel;
      const int64_t numel = std::min(kPartNumel, members.row_numel - first);
      std::fill(total, total + numel, -0.0f);  // -0 + x is x, also for x = -0
      for (int64_t member = 0; member < members.members; ++member) {
        add_run(members.row(member, slice) + first, numel, total);
      }
      divide_block(total, numel, members.members);
      store_run(total, numel, accumulate, means.row(slice) + first);
    }
  });
}

#define ZPP_INSTANTIATE(T, Stored) template void launch_mean<T, Stored>(const MemberRows<T>&, const ValueRows<Stored>&, bool);
ZPP_INSTANTIATE(float, float)
ZPP_INSTANTIATE(c10::BFloat16, float)
ZPP_INSTANTIATE(c10::Half, float)
ZPP_INSTANTIATE(c10::BFloat16, c10::BFloat16)
ZPP_INSTANTIATE(c10::Half, c10::Half)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
