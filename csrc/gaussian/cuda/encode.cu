// encode_gaussian on GPUs: values are read once and stay in registers until their codes are known.
#include "launchers.h"
#include "shares.h"

namespace megatron_zpp::cuda {
namespace {

// Per multiprocessor; one more would spill registers.
template <int kBits>
constexpr int kEncodeGridBlocks = kBits == 1 ? 4 : 3;

template <class Values, class T>
__device__ __forceinline__ Values load_share(const T* values, const Share& share, bool is_wide) {
  constexpr int kChunkNumel = Values::kChunkNumel;
  Values loaded;
#pragma unroll
  for (int chunk = 0; chunk < Values::kChunks; ++chunk) {
    PackedChunk<T> packed{};
    if (share.chunks > 0) {
      const T* source = values + (chunk * kGaussianTeam + share.thread) * kChunkNumel;
      is_wide ? load_wide(source, packed) : load_narrow(source, packed);
    }
#pragma unroll
    for (int pair = 0; pair < kChunkNumel / 2; ++pair) {
      const Pair wide = pair_at(packed, pair);
      loaded.values[chunk * kChunkNumel + 2 * pair] = wide.even;
      loaded.values[chunk * kChunkNumel + 2 * pair + 1] = wide.odd;
    }
  }
  return loaded;
}

template <class Values>
__device__ __forceinline__ uint32_t largest_of_block(const Values& share) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) {
    largest = larger(largest, ValueFormat<float>::magnitude(share.values[i]));
  }
  return max_among<kGaussianTeam>(largest);
}

// The values times `factor`, rotated. signs: those of each round.
template <class Values>
__device__ __forceinline__ void rotate_share(Values& share, float factor, int rounds, const uint32_t (&signs)[kMostRounds], int thread) {
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) {
    share.values[i] *= factor;
  }
  flip(share, signs[0]);
  hadamard(share, thread);
  if (rounds > 1) {
    flip(share, signs[1]);
    hadamard(share, thread);
  }
}

// Bit i of every word belongs to value i of the share: the signs, then the bits of the magnitudes, the lowest first.
template <int kBits>
struct ShareCodes {
  uint32_t planes[kBits];
};

// The level of value i of the share, whose magnitude becomes bit i of the planes. Thresholds rise, and so do their products with the
// variance, so each bit of the magnitude, the highest first, halves the levels that are left. Each has the threshold below it, but the first.
template <int kBits>
__device__ __forceinline__ float level_of(float square, float variance, int i, ShareCodes<kBits>& codes) {
  constexpr int kMagnitudes = GaussianLevels<kBits>::kMagnitudes;
  float levels[kMagnitudes], thresholds[kMagnitudes];
#pragma unroll
  for (int magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
    levels[magnitude] = level<kBits>(magnitude);
    if constexpr (kBits > 1) {
      thresholds[magnitude] = magnitude > 0 ? squared_threshold<kBits>(magnitude) * variance : 0.0f;
    }
  }
#pragma unroll
  for (int bit = kBits - 2; bit >= 0; --bit) {
    const int half = 1 << bit;
    const bool is_above = square > thresholds[half];
    codes.planes[1 + bit] |= is_above ? 1u << i : 0u;
#pragma unroll
    for (int rest = 0; rest < half; ++rest) {
      levels[rest] = is_above ? levels[half + rest] : levels[rest];
      thresholds[rest] = is_above ? thresholds[half + rest] : thresholds[rest];
    }
  }
  return levels[0];
}

// product: becomes the sum over the block of products of values with their levels.
template <int kBits, class Values>
__device__ __forceinline__ ShareCodes<kBits> quantized(const Values& share, float variance, float& product) {
  ShareCodes<kBits> codes{};
  product = block_sum<Values>([&](int i) {
    const float value = share.values[i];
    codes.planes[0] |= (bits_of(value) >> (kWordBits - 1)) << i;
    return float_of(ValueFormat<float>::magnitude(value)) * level_of(value * value, variance, i, codes);
  });
  return codes;
}

__device__ __forceinline__ uint16_t scale_of_block(uint32_t largest, float square, float product, int rounds, float up) {
  if (largest == 0) {
    return 0;
  }
  return largest < ValueFormat<float>::kInfinity ? gaussian_scale(square, product, rounds, up) : kNanScale;
}

template <int kBits, class T>
__global__ void __launch_bounds__(kGaussianThreads, kEncodeGridBlocks<kBits>)
    encode_gaussian_kernel(ValueRows<const T> values, GaussianRows<uint8_t> payloads, int rounds, Noise noise, bool is_wide) {
  constexpr int kChunkNumel = PackedChunk<T>::kNumel;
  using Values = ValueShare<kChunkNumel>;
  using Teams = typename Values::Teams;
  const int own = static_cast<int>(threadIdx.x) % kGaussianTeam;
  const uint32_t signs[kMostRounds] = {signs_of_share<kChunkNumel>(noise, 0, own), signs_of_share<kChunkNumel>(noise, 1, own)};
  for_each_block<Teams>(
      payloads.rows.slices, payloads.blocks(), kGaussianNumel, [&](int64_t slice, int64_t block, const Share& share) {
        Values some = load_share<Values>(values.row(slice) + block * kGaussianNumel, share, is_wide);
        const uint32_t largest = largest_of_block(some);
        const Prescale prescale = prescale_of(largest);
        rotate_share(some, prescale.down, rounds, signs, share.thread);
        const float square = block_sum<Values>([&](int i) { return some.values[i] * some.values[i]; });
        float product;
        const ShareCodes<kBits> codes = quantized<kBits>(some, variance_of(square), product);
        const uint16_t scale = scale_of_block(largest, square, product, rounds, prescale.up);
        const bool has_codes = has_gaussian_codes(scale);
        auto* planes = reinterpret_cast<uint32_t*>(payloads.planes(0, slice) + block * kBits * kPlaneBytes);
#pragma unroll
        for (int plane = 0; plane < kBits; ++plane) {
          const uint32_t word = exchanged<kChunkNumel>(codes.planes[plane], share.thread);
          if (share.chunks > 0) {
            planes[plane * kPlaneWords + word_of<kChunkNumel>(share.thread)] = has_codes ? word : 0u;
          }
        }
        if (share.chunks > 0 && share.thread == 0) {
          payloads.scales(0, slice)[block] = scale;
        }
      });
}

}  // namespace

template <int kBits, class T>
cudaError_t launch_encode_gaussian(ValueRows<const T> values, GaussianRows<uint8_t> payloads, int rounds, Noise noise, cudaStream_t stream) {
  using Teams = typename ValueShare<PackedChunk<T>::kNumel>::Teams;
  const int64_t slices = payloads.rows.slices;
  const bool is_wide = has_wide_access(values, slices);
  return start<Teams>(
      encode_gaussian_kernel<kBits, T>, slices, payloads.blocks(), stream, values, payloads, rounds, noise, is_wide);
}

#define ZPP_INSTANTIATE(bits, T) \
  template cudaError_t launch_encode_gaussian<bits, T>(ValueRows<const T>, GaussianRows<uint8_t>, int, Noise, cudaStream_t);
#define ZPP_INSTANTIATE_BITS(T) ZPP_INSTANTIATE(1, T) ZPP_INSTANTIATE(2, T) ZPP_INSTANTIATE(3, T) ZPP_INSTANTIATE(4, T)
ZPP_INSTANTIATE_BITS(float)
ZPP_INSTANTIATE_BITS(Bf16Bits)
ZPP_INSTANTIATE_BITS(Fp16Bits)
#undef ZPP_INSTANTIATE_BITS
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
