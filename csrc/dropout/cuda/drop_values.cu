// drop_values on GPUs: every thread takes chunks of 16 bytes.
#include "../../quantization/cuda/teams.h"
#include "../../quantization/cuda/value_chunks.h"
#include "launcher.h"

namespace megatron_zpp::cuda {
namespace {

constexpr int kDropThreads = 256;
// Of a multiprocessor: with one load per thread, all of them are needed to hide latency. GPUs of data centres have 2048.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int kMultiprocessorThreads = 2048;
#else
constexpr int kMultiprocessorThreads = 1536;
#endif

// hash_of: position in the chunk to the hash of that value.
template <class T, class HashOf>
__device__ __forceinline__ PackedChunk<T> dropped_chunk(const PackedChunk<T>& chunk, const Mask& mask, HashOf hash_of) {
  return packed<PackedChunk<T>>([&](int pair) {
    const Pair values = pair_at(chunk, pair);
    return Pair{mask.applied(values.even, hash_of(2 * pair)), mask.applied(values.odd, hash_of(2 * pair + 1))};
  });
}

// first: the index in `values` of the chunk's first value.
template <class T>
__device__ __forceinline__ PackedChunk<T> dropped_chunk(const PackedChunk<T>& chunk, const Mask& mask, int64_t first) {
  if (mask.before_carry(first) >= PackedChunk<T>::kNumel) {
    const PairHashes hashes = mask.hashes(first);
    return dropped_chunk(chunk, mask, [&](int i) { return hashes.at(i); });
  }
  return dropped_chunk(chunk, mask, [&](int i) { return mask.hashes(first + i).at(0); });
}

template <class T>
__global__ void __launch_bounds__(kDropThreads, kMultiprocessorThreads / kDropThreads)
    drop_kernel(const T* values, T* dropped, int64_t numel, Mask mask, bool is_wide) {
  constexpr int kNumel = PackedChunk<T>::kNumel;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kDropThreads * kNumel;
  for (int64_t first = (static_cast<int64_t>(blockIdx.x) * kDropThreads + threadIdx.x) * kNumel; first < numel; first += step) {
    const int64_t count = numel - first;
    const bool is_wide_and_whole = is_wide && count >= kNumel;
    PackedChunk<T> chunk;
    is_wide_and_whole ? load_wide(values + first, chunk) : load_some(values + first, count, chunk);
    chunk = dropped_chunk(chunk, mask, first);
    is_wide_and_whole ? store_wide(chunk, dropped + first) : store_some(chunk, count, dropped + first);
  }
}

}  // namespace

template <class T>
cudaError_t launch_drop(const T* values, T* dropped, int64_t numel, const Mask& mask, cudaStream_t stream) {
  constexpr int64_t kGridBlockNumel = int64_t{kDropThreads} * PackedChunk<T>::kNumel;
  const int64_t grid_blocks = (numel + kGridBlockNumel - 1) / kGridBlockNumel;
  const auto addresses = reinterpret_cast<uintptr_t>(values) | reinterpret_cast<uintptr_t>(dropped);
  const bool is_wide = addresses % kWideAccessBytes == 0;
  return start_grid(drop_kernel<T>, 1, grid_blocks, kDropThreads, stream, values, dropped, numel, mask, is_wide);
}

#define ZPP_INSTANTIATE(T) template cudaError_t launch_drop<T>(const T*, T*, int64_t, const Mask&, cudaStream_t);
ZPP_INSTANTIATE(float)
ZPP_INSTANTIATE(Bf16Bits)
ZPP_INSTANTIATE(Fp16Bits)
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
