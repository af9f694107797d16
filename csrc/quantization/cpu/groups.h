// Distributes the blocks of all slices to threads, in groups that fit the first-level cache and never span two slices.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace megatron_zpp::cpu {

constexpr int64_t kGroupNumel = 4096;      // 16 KiB of fp32, half of a first-level data cache
constexpr int64_t kMostGroupBlocks = 16;   // enough to hide the latency of one block's scale behind the others
constexpr int64_t kThreadNumel = 1 << 15;  // for fewer values it does not pay to wake a thread

struct Group {
  int64_t slice;
  int64_t first_block;
  int64_t blocks;
};

inline int64_t group_blocks(int64_t block_numel) { return std::clamp<int64_t>(kGroupNumel / block_numel, 1, kMostGroupBlocks); }

// Calls work(group, scratch) for every group of `slices` rows of `blocks` blocks, on the threads of at::parallel_for;
// scratch: fp32 of one group.
template <class Work>
void for_each_group(int64_t slices, int64_t blocks, int64_t block_numel, Work work) {
  const int64_t most_blocks = group_blocks(block_numel);
  const int64_t groups_per_slice = (blocks + most_blocks - 1) / most_blocks;
  const int64_t grain = std::max<int64_t>(1, kThreadNumel / (most_blocks * block_numel));
  at::parallel_for(0, slices * groups_per_slice, grain, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique<float[]>(most_blocks * block_numel);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t first_block = index % groups_per_slice * most_blocks;
      work(Group{index / groups_per_slice, first_block, std::min(most_blocks, blocks - first_block)}, scratch.get());
    }
  });
}

}  // namespace megatron_zpp::cpu
