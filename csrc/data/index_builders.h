// Builds the indices of training samples and of blends. megatron_zpp/data/index_builders.py computes the same numbers in numpy.
//
// lengths         [documents] int32         tokens of each document
// document_index  [positions] int32         the document at each position of the stream
// sample_index    [samples + 1, 2]          int32 or int64: position and offset of the token that each sample starts with
// weights         [datasets] fp64           shares, with sum 1
// dataset_index   [samples] int16 or int32  the dataset that each sample of the blend comes from
// dataset_sample  [samples] int64           the index of the sample in that dataset
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

namespace megatron_zpp::data {

inline void check_array(const at::Tensor& array, const char* name, int64_t dims) {
  TORCH_CHECK(array.dim() == dims, name, " must have ", dims, " dims, not ", array.dim());
  TORCH_CHECK(array.is_contiguous(), name, " must be contiguous");
}

inline int64_t length_at(const int32_t* lengths, int64_t documents, const int32_t* document_index, int64_t position) {
  const int64_t document = document_index[position];
  TORCH_CHECK(document >= 0 && document < documents, "document_index holds ", document, ", there are ", documents, " documents");
  return lengths[document];
}

// Sample i starts with token i * seq_length of the stream. The first one starts at position 0, even if that document is empty.
template <class Index>
void cut_stream(const at::Tensor& lengths, const at::Tensor& document_index, int64_t seq_length, const at::Tensor& sample_index) {
  const auto* length_of = lengths.const_data_ptr<int32_t>();
  const auto* document_at = document_index.const_data_ptr<int32_t>();
  auto* start_of = sample_index.mutable_data_ptr<Index>();
  const int64_t positions = document_index.numel();
  int64_t position = 0;
  int64_t position_start = 0;
  int64_t position_end = positions > 0 ? length_at(length_of, lengths.numel(), document_at, 0) : 0;
  for (int64_t sample = 1; sample < sample_index.size(0); ++sample) {
    const int64_t token = sample * seq_length;
    while (position_end <= token) {
      ++position;
      TORCH_CHECK(position < positions, "the stream of ", position_end, " tokens ends before sample ", sample, " starts");
      position_start = position_end;
      position_end += length_at(length_of, lengths.numel(), document_at, position);
    }
    start_of[2 * sample] = static_cast<Index>(position);
    start_of[2 * sample + 1] = static_cast<Index>(token - position_start);
  }
  std::fill_n(start_of, std::min<int64_t>(sample_index.numel(), 2), Index{0});
}

inline void build_sample_index(const at::Tensor& lengths, const at::Tensor& document_index, int64_t seq_length, at::Tensor& sample_index) {
  check_array(lengths, "lengths", 1);
  check_array(document_index, "document_index", 1);
  check_array(sample_index, "sample_index", 2);
  TORCH_CHECK(sample_index.size(1) == 2, "sample_index must have rows of 2 values, not ", sample_index.size(1));
  TORCH_CHECK(seq_length > 0, "seq_length must be at least 1, not ", seq_length);
  switch (sample_index.scalar_type()) {
    case at::kInt:
      return cut_stream<int32_t>(lengths, document_index, seq_length, sample_index);
    case at::kLong:
      return cut_stream<int64_t>(lengths, document_index, seq_length, sample_index);
    default:
      TORCH_CHECK(false, "sample_index must be int32 or int64, not ", sample_index.scalar_type());
  }
}

// Each sample comes from the dataset that is furthest behind its share; among equals, from the first.
template <class Index>
void deal_samples(const at::Tensor& weights, const at::Tensor& dataset_index, const at::Tensor& dataset_sample) {
  const auto* weight_of = weights.const_data_ptr<double>();
  auto* dataset_at = dataset_index.mutable_data_ptr<Index>();
  auto* sample_at = dataset_sample.mutable_data_ptr<int64_t>();
  std::vector<int64_t> drawn(weights.numel(), 0);
  for (int64_t sample = 0; sample < dataset_index.numel(); ++sample) {
    const double taken = static_cast<double>(std::max<int64_t>(sample, 1));
    int64_t furthest = 0;
    double most_behind = weight_of[0] * taken - static_cast<double>(drawn[0]);
    for (int64_t dataset = 1; dataset < weights.numel(); ++dataset) {
      const double behind = weight_of[dataset] * taken - static_cast<double>(drawn[dataset]);
      if (behind > most_behind) {
        most_behind = behind;
        furthest = dataset;
      }
    }
    dataset_at[sample] = static_cast<Index>(furthest);
    sample_at[sample] = drawn[furthest]++;
  }
}

inline void build_blend_index(const at::Tensor& weights, at::Tensor& dataset_index, at::Tensor& dataset_sample) {
  check_array(weights, "weights", 1);
  check_array(dataset_index, "dataset_index", 1);
  check_array(dataset_sample, "dataset_sample", 1);
  TORCH_CHECK(weights.numel() > 0, "weights is empty: a blend needs at least one dataset");
  TORCH_CHECK(dataset_index.numel() == dataset_sample.numel(), "dataset_index and dataset_sample differ in length");
  const int64_t largest = dataset_index.scalar_type() == at::kShort ? INT16_MAX : INT32_MAX;
  TORCH_CHECK(weights.numel() - 1 <= largest, weights.numel(), " datasets do not fit a dataset_index of ", dataset_index.scalar_type());
  switch (dataset_index.scalar_type()) {
    case at::kShort:
      return deal_samples<int16_t>(weights, dataset_index, dataset_sample);
    case at::kInt:
      return deal_samples<int32_t>(weights, dataset_index, dataset_sample);
    default:
      TORCH_CHECK(false, "dataset_index must be int16 or int32, not ", dataset_index.scalar_type());
  }
}

}  // namespace megatron_zpp::data
