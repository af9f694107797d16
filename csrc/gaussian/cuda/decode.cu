// decode_gaussian and decode_mean_gaussian on GPUs.
#include "../../quantization/cuda/mean_of_members.h"
#include "launchers.h"
#include "shares.h"

namespace megatron_zpp::cuda {
namespace {

constexpr int kDecodeGridBlocks = 5;  // per multiprocessor; 6 would spill registers
constexpr int kGoingOnGridBlocks = 4;  // the same for sums that go on

// The entry of `table` whose index is the number that bit i of the words forms, by halves of the table.
template <int kBits>
__device__ __forceinline__ float chosen(const float* table, const uint32_t* words, int i) {
  if constexpr (kBits == 0) {
    return table[0];
  } else {
    constexpr int kHalf = 1 << (kBits - 1);
    const float low = chosen<kBits - 1>(table, words, i), high = chosen<kBits - 1>(table + kHalf, words, i);
    return ((words[kBits - 1] >> i) & 1u) != 0 ? high : low;
  }
}

// The share of one message's block; NaN if its scale is not finite. All threads of a warp call it together.
template <int kBits, class Values>
__device__ __forceinline__ Values decoded_share(
    const GaussianRows<const uint8_t>& payloads, int64_t member, int64_t slice, int64_t block, int rounds, const Noise& noise, const Share& share) {
  constexpr int kChunkNumel = Values::kChunkNumel, kMagnitudes = GaussianLevels<kBits>::kMagnitudes;
  uint16_t scale = 0;
  uint32_t words[kBits] = {};
  if (share.chunks > 0) {
    scale = payloads.scales(member, slice)[block];
    const auto* planes = reinterpret_cast<const uint32_t*>(payloads.planes(member, slice) + block * kBits * kPlaneBytes);
#pragma unroll
    for (int plane = 0; plane < kBits; ++plane) {
      words[plane] = planes[plane * kPlaneWords + word_of<kChunkNumel>(share.thread)];
    }
  }
#pragma unroll
  for (int plane = 0; plane < kBits; ++plane) {
    words[plane] = exchanged<kChunkNumel>(words[plane], share.thread);
  }
  const float factor = decoding_factor(scale, rounds);
  float table[kMagnitudes];
#pragma unroll
  for (int magnitude = 0; magnitude < kMagnitudes; ++magnitude) {
    table[magnitude] = level<kBits>(magnitude) * factor;
  }
  Values decoded;
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) {
    decoded.values[i] = chosen<kBits - 1>(table, words + 1, i);
  }
  flip(decoded, words[0]);
  hadamard(decoded, share.thread);
  if (rounds > 1) {
    flip(decoded, signs_of_share<kChunkNumel>(noise, 1, share.thread));
    hadamard(decoded, share.thread);
  }
  flip(decoded, signs_of_share<kChunkNumel>(noise, 0, share.thread));
  if (!is_finite_scale(scale)) {
#pragma unroll
    for (int i = 0; i < kShareNumel; ++i) {
      decoded.values[i] = float_of(kNanScaleBits);
    }
  }
  return decoded;
}

// Writes a share, or adds it to what is there.
template <class Values, class T>
__device__ __forceinline__ void store_share(const Values& share, int thread, bool accumulate, bool is_wide, T* values) {
  constexpr int kChunkNumel = Values::kChunkNumel;
#pragma unroll
  for (int chunk = 0; chunk < Values::kChunks; ++chunk) {
    T* target = values + (chunk * kGaussianTeam + thread) * kChunkNumel;
    PackedChunk<T> before{};
    if (accumulate) {
      is_wide ? load_wide(target, before) : load_narrow(target, before);
    }
    const auto after = packed<PackedChunk<T>>([&](int pair) {
      const Pair old = pair_at(before, pair);
      const float even = share.values[chunk * kChunkNumel + 2 * pair], odd = share.values[chunk * kChunkNumel + 2 * pair + 1];
      return accumulate ? Pair{old.even + even, old.odd + odd} : Pair{even, odd};
    });
    is_wide ? store_wide(after, target) : store_narrow(after, target);
  }
}

// Adds the share of a block's values.
template <class Values>
__device__ __forceinline__ void add_share(const float* values, int thread, Values& share) {
  constexpr int kChunkNumel = Values::kChunkNumel;
#pragma unroll
  for (int i = 0; i < kShareNumel; ++i) {
    share.values[i] += values[(i / kChunkNumel * kGaussianTeam + thread) * kChunkNumel + i % kChunkNumel];
  }
}

// kGoesOn: whether the sum goes on from `before`.
template <int kBits, class T, bool kGoesOn>
__global__ void __launch_bounds__(kGaussianThreads, kGoesOn ? kGoingOnGridBlocks : kDecodeGridBlocks) decode_gaussian_kernel(
    GaussianRows<const uint8_t> payloads,
    ValueRows<T> means,
    int rounds,
    SenderNoises noises,
    ValueRows<const float> before,
    Divisor divisor,
    bool accumulate,
    bool is_wide) {
  using Values = ValueShare<PackedChunk<T>::kNumel>;
  using Teams = typename Values::Teams;
  for_each_block<Teams>(
      payloads.rows.slices, payloads.blocks(), kGaussianNumel, [&](int64_t slice, int64_t block, const Share& share) {
        const auto decoded = [&](int64_t member) {
          const Noise noise = noises.at(noises.is_by_slice ? slice : member);
          return decoded_share<kBits, Values>(payloads, member, slice, block, rounds, noise, share);
        };
        Values total = decoded(0);
        if (kGoesOn && share.chunks > 0) {
          add_share(before.row(slice) + block * kGaussianNumel, share.thread, total);
        }
        for (int64_t member = 1; member < payloads.rows.members; ++member) {
          const Values other = decoded(member);
#pragma unroll
          for (int i = 0; i < kShareNumel; ++i) {
            total.values[i] += other.values[i];
          }
        }
#pragma unroll
        for (int i = 0; i < kShareNumel; ++i) {
          total.values[i] = divisor.divided(total.values[i]);
        }
        if (share.chunks > 0) {
          store_share(total, share.thread, accumulate, is_wide, means.row(slice) + block * kGaussianNumel);
        }
      });
}

}  // namespace

template <int kBits, class T>
cudaError_t launch_decode_gaussian(
    GaussianRows<const uint8_t> payloads,
    ValueRows<T> means,
    int rounds,
    const SenderNoises& noises,
    ValueRows<const float> before,
    int64_t divisor,
    bool accumulate,
    cudaStream_t stream) {
  using Teams = typename ValueShare<PackedChunk<T>::kNumel>::Teams;
  const int64_t slices = payloads.rows.slices;
  const bool is_wide = has_wide_access(means, slices);
  auto* kernel = decode_gaussian_kernel<kBits, T, false>;
  if constexpr (std::is_same_v<T, float>) {  // sums are wide
    kernel = before.base == nullptr ? kernel : decode_gaussian_kernel<kBits, T, true>;
  }
  return start<Teams>(
      kernel,
      slices,
      payloads.blocks(),
      stream,
      payloads,
      means,
      rounds,
      noises,
      before,
      divisor_of(divisor),
      accumulate,
      is_wide);
}

#define ZPP_INSTANTIATE(bits, T)                   \
  template cudaError_t launch_decode_gaussian<bits, T>( \
      GaussianRows<const uint8_t>, ValueRows<T>, int, const SenderNoises&, ValueRows<const float>, int64_t, bool, cudaStream_t);
#define ZPP_INSTANTIATE_BITS(T) ZPP_INSTANTIATE(1, T) ZPP_INSTANTIATE(2, T) ZPP_INSTANTIATE(3, T) ZPP_INSTANTIATE(4, T)
ZPP_INSTANTIATE_BITS(float)
ZPP_INSTANTIATE_BITS(Bf16Bits)
ZPP_INSTANTIATE_BITS(Fp16Bits)
#undef ZPP_INSTANTIATE_BITS
#undef ZPP_INSTANTIATE

}  // namespace megatron_zpp::cuda
