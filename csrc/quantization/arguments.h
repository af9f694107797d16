// Checks tensor arguments, so that every access is in bounds, and converts them to rows.
// megatron_zpp/ops/quantization.py makes the same checks and more for users, with better messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <type_traits>

#include "noise.h"
#include "rows.h"

namespace megatron_zpp {

inline void check_format(int64_t row_numel, int64_t bits, int64_t block_numel) {
  TORCH_CHECK(bits == 4 || bits == 8, "bits must be 4 or 8, not ", bits);
  const bool is_whole = block_numel > 0 && block_numel % kBlockNumelMultiple == 0;
  TORCH_CHECK(is_whole, "block_numel must be a positive multiple of ", kBlockNumelMultiple, ", not ", block_numel);
  const bool is_row_whole = row_numel >= 0 && row_numel % block_numel == 0;
  TORCH_CHECK(is_row_whole, "a row must have a multiple of block_numel ", block_numel, " values, not ", row_numel);
}

inline void check_inner_dim(const at::Tensor& tensor, const char* name) {
  const bool is_contiguous = tensor.numel() == 0 || tensor.size(-1) == 1 || tensor.stride(-1) == 1;
  TORCH_CHECK(is_contiguous, name, " must be contiguous in its inner dim");
}

template <class T>
ValueRows<const T> readable_values(const at::Tensor& values) {
  return {values.const_data_ptr<T>(), values.stride(0)};
}

template <class T>
ValueRows<T> writable_values(const at::Tensor& values) {
  return {values.mutable_data_ptr<T>(), values.stride(0)};
}

inline void check_values(const at::Tensor& values, const char* name) {
  TORCH_CHECK(values.dim() == 2, name, " must have 2 dims, [slices, numel], not ", values.dim());
  check_inner_dim(values, name);
}

inline void check_payloads(const at::Tensor& payloads, const char* name, int64_t dims, int64_t slices, const RowLayout& layout) {
  TORCH_CHECK(payloads.scalar_type() == at::kByte, name, " must be uint8, not ", payloads.scalar_type());
  TORCH_CHECK(payloads.dim() == dims, name, " must have ", dims, " dims, not ", payloads.dim());
  TORCH_CHECK(payloads.size(-2) == slices, name, " must have ", slices, " slices, not ", payloads.size(-2));
  const int64_t row_bytes = payloads.size(-1);
  TORCH_CHECK(row_bytes >= layout.coded_bytes, name, " must have rows of at least ", layout.coded_bytes, " bytes, not ", row_bytes);
  check_inner_dim(payloads, name);
  bool is_aligned = reinterpret_cast<uintptr_t>(payloads.const_data_ptr()) % kPartAlignmentBytes == 0;
  for (int64_t dim = 0; dim < dims - 1; ++dim) {
    is_aligned = is_aligned && (payloads.size(dim) == 1 || payloads.stride(dim) % kPartAlignmentBytes == 0);
  }
  TORCH_CHECK(payloads.numel() == 0 || is_aligned, name, " has rows that do not start at multiples of ", kPartAlignmentBytes, " bytes");
}

inline PayloadRows<const uint8_t> readable_payloads(const at::Tensor& payloads, const char* name, int64_t slices, const RowLayout& layout) {
  check_payloads(payloads, name, 2, slices, layout);
  return {payloads.const_data_ptr<uint8_t>(), 0, payloads.stride(0), 1, slices, layout};
}

inline PayloadRows<const uint8_t> readable_members(const at::Tensor& payloads, const char* name, int64_t slices, const RowLayout& layout) {
  check_payloads(payloads, name, 3, slices, layout);
  TORCH_CHECK(payloads.size(0) > 0, name, " has no members, and the mean of none is not defined");
  return {payloads.const_data_ptr<uint8_t>(), payloads.stride(0), payloads.stride(1), payloads.size(0), slices, layout};
}

inline PayloadRows<uint8_t> writable_payloads(const at::Tensor& payloads, const char* name, int64_t slices, const RowLayout& layout) {
  check_payloads(payloads, name, 2, slices, layout);
  return {payloads.mutable_data_ptr<uint8_t>(), 0, payloads.stride(0), 1, slices, layout};
}

inline Noise noise_for(const std::optional<int64_t>& key) {
  TORCH_CHECK(!key || *key >= 0, "noise_key must be none or at least 0, not ", key.value_or(0));
  return key ? noise_of(static_cast<uint64_t>(*key)) : kNoNoise;
}

inline void check_is_float(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, name, " must be float32, not ", tensor.scalar_type());
}

// The rows that each operator reads and writes, on any device.

inline PayloadRows<uint8_t> rows_to_encode(const at::Tensor& values, at::Tensor& payloads, int64_t bits, int64_t block_numel) {
  check_values(values, "values");
  check_format(values.size(1), bits, block_numel);
  return writable_payloads(payloads, "payloads", values.size(0), row_layout(values.size(1), bits, block_numel));
}

inline PayloadRows<const uint8_t> rows_to_decode(const at::Tensor& payloads, const at::Tensor& values, int64_t bits, int64_t block_numel) {
  check_values(values, "values");
  check_format(values.size(1), bits, block_numel);
  return readable_payloads(payloads, "payloads", values.size(0), row_layout(values.size(1), bits, block_numel));
}

inline PayloadRows<const uint8_t> members_to_decode(const at::Tensor& payloads, const at::Tensor& mean, int64_t bits, int64_t block_numel) {
  check_values(mean, "mean");
  check_format(mean.size(1), bits, block_numel);
  check_is_float(mean, "mean");
  return readable_members(payloads, "payloads", mean.size(0), row_layout(mean.size(1), bits, block_numel));
}

struct RecodedRows {
  PayloadRows<const uint8_t> members;
  PayloadRows<uint8_t> recoded;
};

inline RecodedRows rows_to_recode(
    const at::Tensor& payloads, at::Tensor& recoded, int64_t row_numel, int64_t bits, int64_t next_bits, int64_t block_numel) {
  check_format(row_numel, bits, block_numel);
  check_format(row_numel, next_bits, block_numel);
  TORCH_CHECK(recoded.dim() == 2, "recoded must have 2 dims, [slices, bytes], not ", recoded.dim());
  const int64_t slices = recoded.size(0);
  return {
      readable_members(payloads, "payloads", slices, row_layout(row_numel, bits, block_numel)),
      writable_payloads(recoded, "recoded", slices, row_layout(row_numel, next_bits, block_numel))};
}

// Calls launch with the bits as a compile-time constant.
template <class Launch>
void dispatch_bits(int64_t bits, Launch launch) {
  switch (bits) {
    case 4:
      return launch(std::integral_constant<int, 4>());
    case 8:
      return launch(std::integral_constant<int, 8>());
    default:
      TORCH_CHECK(false, "bits must be 4 or 8, not ", bits);
  }
}

// Calls launch with a value of the C++ type that the tensor holds.
template <class Launch>
void dispatch_values(const at::Tensor& values, const char* name, Launch launch) {
  switch (values.scalar_type()) {
    case at::kFloat:
      return launch(float());
    case at::kBFloat16:
      return launch(c10::BFloat16());
    case at::kHalf:
      return launch(c10::Half());
    default:
      TORCH_CHECK(false, name, " must be float32, bfloat16 or float16, not ", values.scalar_type());
  }
}

}  // namespace megatron_zpp
