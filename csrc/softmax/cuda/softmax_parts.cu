// softmax_parts on GPUs: a grid block reads the logits of a token once, and keeps their largest and a sum that refers to it.
#undef NDEBUG
#include <cassert>
#include <cmath>

#include "token_rows.h"

namespace megatron_zpp::cuda {
namespace {

// Of some logits: the largest, and the sum of exp(logit - largest). Logits of -inf add 0, and if all are -inf, the sum is 0. One that is NaN
// or +inf makes the sum NaN. It stays so, because 0 times NaN is NaN.
struct RunningSum {
  float largest = -INFINITY;
  float sum = 0.0f;

  // What exponents are counted from: -inf minus -inf would be NaN.
  __device__ __forceinline__ static float origin(float largest) { return largest == -INFINITY ? 0.0f : largest; }

  __device__ __forceinline__ void raise(float to) {
    if (to > largest) {
      sum *= expf(largest - to);
      largest = to;
    }
  }

  // Left plus right has the bits of right plus left, so threads that exchange their sums have the same one afterwards.
  __device__ __forceinline__ void add(const RunningSum& other) {
    const float both = other.largest > largest ? other.largest : largest;
    sum = sum * expf(largest - origin(both)) + other.sum * expf(other.largest - origin(both));
    largest = both;
  }
};

template <class T>
__device__ __forceinline__ void add_chunk(const PackedChunk<T>& chunk, int count, RunningSum& running) {
  const auto wide = widened(chunk);
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < PackedChunk<T>::kNumel; ++i) {
    largest = i < count && wide.values[i] > largest ? wide.values[i] : largest;
  }
  running.raise(largest);
  const float origin = RunningSum::origin(running.largest);
#pragma unroll
  for (int i = 0; i < PackedChunk<T>::kNumel; ++i) {
    running.sum += i < count ? expf(wide.values[i] - origin) : 0.0f;
  }
}

__device__ __forceinline__ RunningSum of_thread(const RunningSum& own, int distance) {
  const uint32_t largest = __shfl_xor_sync(kWholeWarp, bits_of(own.largest), distance);
  return {float_of(largest), float_of(__shfl_xor_sync(kWholeWarp, bits_of(own.sum), distance))};
}

template <int kThreads>
__device__ __forceinline__ RunningSum added_among(RunningSum own) {
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    own.add(of_thread(own, distance));
  }
  return own;
}

// Of all threads of the grid block, which must call it together.
__device__ __forceinline__ RunningSum added(const RunningSum& own) {
  __shared__ float largest_of_warps[kTokenWarps], sums_of_warps[kTokenWarps];
  const RunningSum of_warp = added_among<kWarpThreads>(own);
  __syncthreads();  // until all threads have read the entries of the token before
  if (threadIdx.x % kWarpThreads == 0) {
    largest_of_warps[threadIdx.x / kWarpThreads] = of_warp.largest;
    sums_of_warps[threadIdx.x / kWarpThreads] = of_warp.sum;
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) % kTokenWarps;
  return added_among<kTokenWarps>({largest_of_warps[warp], sums_of_warps[warp]});
}

template <class T>
__device__ __forceinline__ float widened_one(const T* value) {
  PackedChunk<T> chunk;
  load_some(value, 1, chunk);
  return pair_at(chunk, 0).even;
}

// The label's logit; 0 if other logits of the vocabulary have it.
template <class T>
__device__ __forceinline__ float label_logit(const LogitRows<T>& rows, int64_t token) {
  const int64_t label = rows.labels[token], column = label - rows.first;
  assert(label >= 0 && label < rows.entries && "a label is outside of the vocabulary");
  return column >= 0 && column < rows.columns ? widened_one(rows.logits.row(token) + column) : 0.0f;
}

template <bool kIsWide, class T>
__global__ void __launch_bounds__(kTokenThreads) softmax_parts_kernel(LogitRows<T> rows, TokenSums<float> sums, float* label) {
  for_each_token(rows.tokens, [&](int64_t token) {
    RunningSum running;
    for_each_chunk<kIsWide>(rows.logits.row(token), rows.columns, [&](int64_t, int count, const PackedChunk<T>& chunk) {
      add_chunk(chunk, count, running);
    });
    const RunningSum whole = added(running);
    if (threadIdx.x == 0) {
      sums.largest[token] = whole.largest;
      sums.sums[token] = whole.sum;
      label[token] = label_logit(rows, token);
    }
  });
}

}  // namespace

template <class T>
cudaError_t launch_softmax_parts(const LogitRows<T>& rows, const TokenSums<float>& sums, float* label, cudaStream_t stream) {
  if (has_wide_access(rows.logits, rows.tokens)) {
    return start_tokens(softmax_parts_kernel<true, T>, rows.tokens, stream, rows, sums, label);
  }
  return start_tokens(softmax_parts_kernel<false, T>, rows.tokens, stream, rows, sums, label);
}

#define ZPP_INSTANTIATE(T) \
  template cudaError_t launch_softmax_parts<T>(const LogitRows<T>&, const TokenSums<float>&, float*, cudaStream_t);
ZPP_INSTANTIATE(float)
ZPP_INSTANTIATE(Bf16Bits)
ZPP_INSTANTIATE(Fp16Bits)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
