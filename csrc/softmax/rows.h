// The logits of some tokens, and what is known of each token, as plain pointers.
#pragma once

#include "../quantization/rows.h"

namespace megatron_zpp {

// Column 0 is entry `first` of a vocabulary of `entries`. Each token has one label, an entry of the whole vocabulary.
template <class T>
struct LogitRows {
  ValueRows<const T> logits;
  const int64_t* labels;
  int64_t tokens;
  int64_t columns;
  int64_t first;
  int64_t entries;
};

// Of each token.
template <class Float>  // float or const float
struct TokenSums {
  Float* largest;
  Float* sums;  // of exp(logit - largest)
};

}  // namespace megatron_zpp
