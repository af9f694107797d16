// softmax_gradient on GPUs: a grid block reads the logits of a token once, and writes their gradient once, where it is told to.
#include <cmath>

#include "token_rows.h"

namespace megatron_zpp::cuda {
namespace {

// What the gradient of a token's logits depends on beside them.
struct Token {
  float largest;
  float factor;  // gradient of the loss, divided by the sum
  float grad_loss;
  int64_t label_column;  // may be outside of the columns

  __device__ __forceinline__ float gradient(float logit, bool is_label) const {
    const float of_softmax = expf(logit - largest) * factor;
    return is_label ? of_softmax - grad_loss : of_softmax;
  }
};

template <class T>
__device__ __forceinline__ PackedChunk<T> gradient_of(const PackedChunk<T>& chunk, int64_t first, const Token& token) {
  constexpr int kNumel = PackedChunk<T>::kNumel;
  const int64_t label_place = token.label_column - first;
  const int place = label_place >= 0 && label_place < kNumel ? static_cast<int>(label_place) : -1;
  return packed<PackedChunk<T>>([&](int pair) {
    const Pair logits = pair_at(chunk, pair);
    return Pair{token.gradient(logits.even, 2 * pair == place), token.gradient(logits.odd, 2 * pair + 1 == place)};
  });
}

template <bool kIsWide, class T>
__global__ void __launch_bounds__(kTokenThreads)
    softmax_gradient_kernel(LogitRows<T> rows, TokenSums<const float> sums, const float* grad_loss, ValueRows<T> gradient) {
  for_each_token(rows.tokens, [&](int64_t index) {
    const float upstream = grad_loss[index];
    const Token token{sums.largest[index], upstream / sums.sums[index], upstream, rows.labels[index] - rows.first};
    T* const target = gradient.row(index);
    for_each_chunk<kIsWide>(rows.logits.row(index), rows.columns, [&](int64_t first, int count, const PackedChunk<T>& chunk) {
      if (kIsWide && count == PackedChunk<T>::kNumel) {
        store_wide(gradient_of(chunk, first, token), target + first);
      } else {
        store_some(gradient_of(chunk, first, token), count, target + first);
      }
    });
  });
}

}  // namespace

template <class T>
cudaError_t launch_softmax_gradient(
    const LogitRows<T>& rows, const TokenSums<const float>& sums, const float* grad_loss, ValueRows<T> gradient, cudaStream_t stream) {
  if (has_wide_access(rows.logits, rows.tokens) && has_wide_access(gradient, rows.tokens)) {
    return start_tokens(softmax_gradient_kernel<true, T>, rows.tokens, stream, rows, sums, grad_loss, gradient);
  }
  return start_tokens(softmax_gradient_kernel<false, T>, rows.tokens, stream, rows, sums, grad_loss, gradient);
}

#define ZPP_INSTANTIATE(T)                              \
  template cudaError_t launch_softmax_gradient<T>(      \
      const LogitRows<T>&, const TokenSums<const float>&, const float*, ValueRows<T>, cudaStream_t);
ZPP_INSTANTIATE(float)
ZPP_INSTANTIATE(Bf16Bits)
ZPP_INSTANTIATE(Fp16Bits)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
