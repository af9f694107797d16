// The values of all members as plain pointers and strides.
#pragma once

#include "../quantization/rows.h"

namespace megatron_zpp {

// Run [member, slice] starts at base + member * member_stride + slice * slice_stride.
template <class T>
struct MemberRows {
  const T* base;
  int64_t member_stride;  // elements
  int64_t slice_stride;   // elements
  int64_t members;
  int64_t slices;
  int64_t row_numel;

  ZPP_HOST_DEVICE const T* row(int64_t member, int64_t slice) const { return base + member * member_stride + slice * slice_stride; }
};

}  // namespace megatron_zpp
