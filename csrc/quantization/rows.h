// The arguments of kernels: plain pointers and strides.
#pragma once

#include <type_traits>

#include "block_format.h"

namespace megatron_zpp {

// The payload rows of all members: row [member, slice] starts at base + member * member_stride + slice * slice_stride.
template <class Byte>  // uint8_t or const uint8_t
struct PayloadRows {
  Byte* base;
  int64_t member_stride;  // bytes
  int64_t slice_stride;   // bytes
  int64_t members;
  int64_t slices;
  RowLayout layout;

  ZPP_HOST_DEVICE Byte* codes(int64_t member, int64_t slice) const { return base + member * member_stride + slice * slice_stride; }
  ZPP_HOST_DEVICE auto* scales(int64_t member, int64_t slice) const {
    using Scale = std::conditional_t<std::is_const_v<Byte>, const float, float>;
    return reinterpret_cast<Scale*>(codes(member, slice) + layout.scales_offset);
  }

  PayloadRows some_members(int64_t first, int64_t count) const {
    return {base + first * member_stride, member_stride, slice_stride, count, slices, layout};
  }
  PayloadRows some_slices(int64_t first, int64_t count) const {
    return {base + first * slice_stride, member_stride, slice_stride, members, count, layout};
  }
};

// One row of values per slice.
template <class T>
struct ValueRows {
  T* base;
  int64_t slice_stride;  // elements

  ZPP_HOST_DEVICE T* row(int64_t slice) const { return base + slice * slice_stride; }
  ValueRows from(int64_t slice) const { return {row(slice), slice_stride}; }
};

}  // namespace megatron_zpp
