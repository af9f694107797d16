// Chunks of values in a thread's registers: 16 bytes of neighbouring fp32, bf16 or fp16 values or half of them, or 4 or 8 computed ones in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "../rows.h"

namespace megatron_zpp::cuda {

constexpr int kWideAccessBytes = 16;
constexpr int kChunkWords = kWideAccessBytes / 4;

template <class T>
constexpr int kFullChunkNumel = kWideAccessBytes / static_cast<int>(sizeof(T));

// With the bytes of memory: a word holds two 16-bit values, the even one in its low half. Half a chunk is moved by an access of 8 bytes.
template <class T, int kNumel_ = kFullChunkNumel<T>>
struct PackedChunk {
  using Value = T;
  using Access = std::conditional_t<kNumel_ == kFullChunkNumel<T>, uint4, uint2>;
  static constexpr int kNumel = kNumel_;
  static constexpr int kWords = kNumel * static_cast<int>(sizeof(T)) / 4;
  static_assert(sizeof(Access) == 4 * kWords, "a chunk is 16 or 8 bytes");
  uint32_t words[kWords];
};

template <int kNumel_>
struct WideChunk {
  using Value = float;
  static constexpr int kNumel = kNumel_;
  float values[kNumel];
};

// ---- Memory ----------------------------------------------------------------------------------------------------------------------------

// Whether all chunks of all rows start at multiples of 16 bytes. Blocks do within a row, because they have a multiple of 64 bytes.
template <class T>
bool has_wide_access(const ValueRows<T>& rows, int64_t slices) {
  const auto stride_bytes = rows.slice_stride * static_cast<int64_t>(sizeof(T));
  return reinterpret_cast<uintptr_t>(rows.base) % kWideAccessBytes == 0 && (slices == 1 || stride_bytes % kWideAccessBytes == 0);
}

template <class T, int kNumel>
__device__ __forceinline__ void load_wide(const T* values, PackedChunk<T, kNumel>& chunk) {
  using Chunk = PackedChunk<T, kNumel>;
  const auto loaded = *reinterpret_cast<const typename Chunk::Access*>(values);
  chunk.words[0] = loaded.x;
  chunk.words[1] = loaded.y;
  if constexpr (Chunk::kWords == kChunkWords) {
    chunk.words[2] = loaded.z;
    chunk.words[3] = loaded.w;
  }
}

// nvcc divides some wide stores into stores of words. It keeps __stwb, whose cache operation is that of a store, as it is.
template <class T, int kNumel>
__device__ __forceinline__ void store_wide(const PackedChunk<T, kNumel>& chunk, T* values) {
  if constexpr (PackedChunk<T, kNumel>::kWords == kChunkWords) {
    __stwb(reinterpret_cast<uint4*>(values), make_uint4(chunk.words[0], chunk.words[1], chunk.words[2], chunk.words[3]));
  } else {
    __stwb(reinterpret_cast<uint2*>(values), make_uint2(chunk.words[0], chunk.words[1]));
  }
}

__device__ __forceinline__ void load_narrow(const float* values, PackedChunk<float>& chunk) {
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    chunk.words[i] = bits_of(values[i]);
  }
}

template <class T>
__device__ __forceinline__ void load_narrow(const T* values, PackedChunk<T>& chunk) {
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    chunk.words[i] = values[2 * i].bits | static_cast<uint32_t>(values[2 * i + 1].bits) << 16;
  }
}

__device__ __forceinline__ void store_narrow(const PackedChunk<float>& chunk, float* values) {
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    values[i] = float_of(chunk.words[i]);
  }
}

template <class T>
__device__ __forceinline__ void store_narrow(const PackedChunk<T>& chunk, T* values) {
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    values[2 * i].bits = static_cast<uint16_t>(chunk.words[i]);
    values[2 * i + 1].bits = static_cast<uint16_t>(chunk.words[i] >> 16);
  }
}

// The first `count` values of a chunk, wherever they start.
__device__ __forceinline__ void load_some(const float* values, int64_t count, PackedChunk<float>& chunk) {
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    chunk.words[i] = i < count ? bits_of(values[i]) : 0u;
  }
}

template <class T, int kNumel>
__device__ __forceinline__ void load_some(const T* values, int64_t count, PackedChunk<T, kNumel>& chunk) {
#pragma unroll
  for (int i = 0; i < PackedChunk<T, kNumel>::kWords; ++i) {
    const uint32_t even = 2 * i < count ? values[2 * i].bits : 0u, odd = 2 * i + 1 < count ? values[2 * i + 1].bits : 0u;
    chunk.words[i] = even | odd << 16;
  }
}

__device__ __forceinline__ void store_some(const PackedChunk<float>& chunk, int64_t count, float* values) {
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    if (i < count) {
      values[i] = float_of(chunk.words[i]);
    }
  }
}

template <class T>
__device__ __forceinline__ void store_some(const PackedChunk<T>& chunk, int64_t count, T* values) {
#pragma unroll
  for (int i = 0; i < 2 * kChunkWords; ++i) {
    if (i < count) {
      values[i].bits = static_cast<uint16_t>(chunk.words[i / 2] >> (16 * (i % 2)));
    }
  }
}

// ---- Values of a chunk as fp32 ---------------------------------------------------------------------------------------------------------

struct Pair {
  float even;
  float odd;
};

template <class T>
__device__ __forceinline__ Pair widened_pair(uint32_t word);

template <>
__device__ __forceinline__ Pair widened_pair<Bf16Bits>(uint32_t word) {
  return {float_of(word << 16), float_of(word & 0xffff0000u)};
}

template <>
__device__ __forceinline__ Pair widened_pair<Fp16Bits>(uint32_t word) {
  __half2 halves;
  memcpy(&halves, &word, sizeof(word));
  const float2 wide = __half22float2(halves);
  return {wide.x, wide.y};
}

// Two of the chunk's values, `pair` < kNumel / 2.
template <class T, int kNumel>
__device__ __forceinline__ Pair pair_at(const PackedChunk<T, kNumel>& chunk, int pair) {
  return widened_pair<T>(chunk.words[pair]);
}

__device__ __forceinline__ Pair pair_at(const PackedChunk<float>& chunk, int pair) {
  return {float_of(chunk.words[2 * pair]), float_of(chunk.words[2 * pair + 1])};
}

template <int kNumel>
__device__ __forceinline__ Pair pair_at(const WideChunk<kNumel>& chunk, int pair) {
  return {chunk.values[2 * pair], chunk.values[2 * pair + 1]};
}

template <class T>
__device__ __forceinline__ WideChunk<PackedChunk<T>::kNumel> widened(const PackedChunk<T>& chunk) {
  WideChunk<PackedChunk<T>::kNumel> wide;
#pragma unroll
  for (int pair = 0; pair < PackedChunk<T>::kNumel / 2; ++pair) {
    const Pair values = pair_at(chunk, pair);
    wide.values[2 * pair] = values.even;
    wide.values[2 * pair + 1] = values.odd;
  }
  return wide;
}

// ---- Largest magnitudes ----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t larger(uint32_t left, uint32_t right) { return left > right ? left : right; }

template <class T>
__device__ __forceinline__ uint32_t largest_magnitude(const PackedChunk<T>& chunk) {
  uint32_t even = 0, odd = 0;
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    even = larger(even, chunk.words[i] & 0x7fffu);
    odd = larger(odd, chunk.words[i] & 0x7fffffffu);  // the even value in the low half matters only if odd values are equal
  }
  return larger(even, odd >> 16);
}

__device__ __forceinline__ uint32_t largest_magnitude(const PackedChunk<float>& chunk) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    largest = larger(largest, chunk.words[i] & 0x7fffffffu);
  }
  return largest;
}

template <int kNumel>
__device__ __forceinline__ uint32_t largest_magnitude(const WideChunk<kNumel>& chunk) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    largest = larger(largest, ValueFormat<float>::magnitude(chunk.values[i]));
  }
  return largest;
}

// ---- fp32 to the values of a chunk -----------------------------------------------------------------------------------------------------

// The word of two values, rounded half to even with subnormals kept; not for NaN.
template <class T>
__device__ __forceinline__ uint32_t narrowed_pair(Pair pair);

template <>
__device__ __forceinline__ uint32_t narrowed_pair<Bf16Bits>(Pair pair) {
  const __nv_bfloat162 narrow = __floats2bfloat162_rn(pair.even, pair.odd);
  uint32_t word;
  memcpy(&word, &narrow, sizeof(word));
  return word;
}

template <>
__device__ __forceinline__ uint32_t narrowed_pair<Fp16Bits>(Pair pair) {
  const __half2 narrow = __floats2half2_rn(pair.even, pair.odd);
  uint32_t word;
  memcpy(&word, &narrow, sizeof(word));
  return word;
}

template <class T>
__device__ __forceinline__ void set_pair(PackedChunk<T>& chunk, int index, Pair pair) {
  chunk.words[index] = narrowed_pair<T>(pair);
}

__device__ __forceinline__ void set_pair(PackedChunk<float>& chunk, int index, Pair pair) {
  chunk.words[2 * index] = bits_of(pair.even);
  chunk.words[2 * index + 1] = bits_of(pair.odd);
}

// The low 16 bits of a word, with the one NaN of their format.
template <class T>
__device__ __forceinline__ uint32_t canonical_bits(uint32_t bits) {
  return (bits & 0x7fffu) > ValueFormat<T>::kInfinity ? ValueFormat<T>::kNan : bits;
}

// Gives every NaN of a chunk the same bits.
template <class T, int kNumel>
__device__ __forceinline__ void make_nan_canonical(PackedChunk<T, kNumel>& chunk) {
#pragma unroll
  for (uint32_t& word : chunk.words) {
    word = canonical_bits<T>(word & 0xffffu) | canonical_bits<T>(word >> 16) << 16;
  }
}

template <int kNumel>
__device__ __forceinline__ void make_nan_canonical(PackedChunk<float, kNumel>& chunk) {
#pragma unroll
  for (uint32_t& word : chunk.words) {
    word = bits_of(with_canonical_nan(float_of(word)));
  }
}

// The chunk of pair_of(0), pair_of(1), ..., where NaN gets its canonical bits. A sum of products with 0 finds whether there is one (or an
// infinity), and only then the chunk is looked through again: integers, comparisons and selections share units with half of a GPU's rate.
template <class Chunk, class PairOf>
__device__ __forceinline__ Chunk packed(PairOf pair_of) {
  Chunk chunk;
  float zero_or_nan = 0.0f;
#pragma unroll
  for (int pair = 0; pair < Chunk::kNumel / 2; ++pair) {
    const Pair values = pair_of(pair);
    set_pair(chunk, pair, values);
    zero_or_nan = __fmaf_rn(values.odd, 0.0f, __fmaf_rn(values.even, 0.0f, zero_or_nan));
  }
  if (zero_or_nan != zero_or_nan) {
    make_nan_canonical(chunk);
  }
  return chunk;
}

}  // namespace megatron_zpp::cuda
