// drop_values on CPUs.
#include <ATen/Parallel.h>

#include "drop_run.h"
#include "launcher.h"

namespace megatron_zpp::cpu {
namespace {

constexpr int64_t kThreadValues = 1 << 15;  // for fewer it does not pay to wake a thread

}  // namespace

template <class T>
void launch_drop(const T* values, T* dropped, int64_t numel, const Mask& mask) {
  at::parallel_for(0, numel, kThreadValues, [&](int64_t begin, int64_t end) { drop_range(values, begin, end, mask, dropped); });
}

#define ZPP_INSTANTIATE(T) template void launch_drop<T>(const T*, T*, int64_t, const Mask&);
ZPP_INSTANTIATE(float)
ZPP_INSTANTIATE(c10::BFloat16)
ZPP_INSTANTIATE(c10::Half)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cpu
