// A stand-in for CUDA's header, to run kernels on the CPU: the threads of a grid block take turns, one fiber each, and change at barriers.
// Each warp runs as far as it can before the next one does, so that shared memory holds wrong values where a barrier is missing. Grid blocks
// run one after the other. A barrier that some threads of a grid block (or lanes of a warp) never reach ends the process.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // one grid block runs at a time

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline void __stwb(uint2* target, uint2 value) { *target = value; }
inline void __stwb(uint4* target, uint4 value) { *target = value; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid configuration argument"; }
inline cudaError_t last_error = cudaSuccess;  // of CUDA: it stays until somebody asks for it
inline cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
using cudaStream_t = void*;
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

namespace cuda_on_cpu {

constexpr unsigned kLanes = 32;
constexpr size_t kStackBytes = 256 * 1024;

struct Warp {
  uint64_t arrivals = 0;
  uint32_t exchanged[2][kLanes] = {};  // by turns: before a slot is written again, all lanes have read it
};

// A thread of a grid block. It changes places by setjmp: swapcontext would ask the operating system twice for every change.
struct Fiber {
  jmp_buf place;
  ucontext_t context;  // for its first turn
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  uint64_t warp_barriers = 0;
  uint64_t block_barriers = 0;
  const uint64_t* awaited = nullptr;  // arrivals at the barrier that it waits at; null: it does not wait
  uint64_t needed = 0;                // of these arrivals
  bool has_begun = false;
  bool is_done = false;

  bool can_go_on() const { return !is_done && (awaited == nullptr || *awaited >= needed); }
};

struct GridBlock {
  std::deque<Fiber> fibers;  // kept for the next grid block; of this one only the first `threads`
  std::vector<Warp> warps;
  std::function<void()> body;
  jmp_buf scheduler;
  unsigned current = 0;
  uint64_t block_arrivals = 0;
};

inline GridBlock running;

inline Fiber& current_fiber() { return running.fibers[running.current]; }

inline void end_turn() {
  if (_setjmp(current_fiber().place) == 0) {
    _longjmp(running.scheduler, 1);
  }
}

inline void wait_until(const uint64_t& arrivals, uint64_t needed) {
  current_fiber().awaited = &arrivals;
  current_fiber().needed = needed;
  if (arrivals < needed) {
    end_turn();
  }
}

inline void run_thread() {
  for (;;) {
    running.body();
    current_fiber().is_done = true;
    end_turn();
  }
}

inline void make_fiber(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_thread, 0);
}

inline void give_turn(Fiber& fiber) {
  if (_setjmp(running.scheduler) != 0) {
    return;  // the fiber's turn is over
  }
  if (fiber.has_begun) {
    _longjmp(fiber.place, 1);
  }
  fiber.has_begun = true;
  setcontext(&fiber.context);
}

// Runs the lanes of a warp until all of them are done or wait for other warps. Returns whether one has run.
inline bool run_warp(unsigned warp) {
  bool has_run = false;
  for (bool goes_on = true; goes_on; has_run = has_run || goes_on) {
    goes_on = false;
    for (unsigned thread = warp * kLanes; thread < (warp + 1) * kLanes; ++thread) {
      if (running.fibers[thread].can_go_on()) {
        goes_on = true;
        running.current = thread;
        threadIdx = dim3(thread);
        give_turn(running.fibers[thread]);
      }
    }
  }
  return has_run;
}

inline void run_grid_block(unsigned threads, const std::function<void()>& body) {
  while (running.fibers.size() < threads) {
    make_fiber(running.fibers.emplace_back());
  }
  running.warps.assign(threads / kLanes, Warp{});
  running.body = body;
  running.block_arrivals = 0;
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = running.fibers[thread];
    fiber.warp_barriers = fiber.block_barriers = 0;
    fiber.awaited = nullptr;
    fiber.is_done = false;
  }
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (unsigned warp = 0; warp < threads / kLanes; ++warp) {
      goes_on = run_warp(warp) || goes_on;
    }
  }
  for (unsigned thread = 0; thread < threads; ++thread) {
    if (!running.fibers[thread].is_done) {
      std::fprintf(stderr, "some threads of a grid block wait at a barrier that others never reach\n");
      std::abort();
    }
  }
}

// EMULATED_GRID_LIMIT in the environment: fewer grid blocks and rows than asked for, so that kernels have to loop over the rest. With 0
// every launch is refused.
inline unsigned limited(unsigned extent) {
  const char* limit = std::getenv("EMULATED_GRID_LIMIT");
  return limit != nullptr && static_cast<unsigned>(std::atoi(limit)) < extent ? static_cast<unsigned>(std::atoi(limit)) : extent;
}

// Runs a kernel in place of the emulation. parameters: their values, of these sizes, as the kernel declares them.
using LaunchHook = void (*)(
    const void* kernel, unsigned columns, unsigned rows, unsigned threads, const void* const* parameters, const size_t* sizes, unsigned count);
inline LaunchHook launch_hook = nullptr;

template <class... Parameters>
void launch_by_hook(void (*kernel)(Parameters...), std::tuple<Parameters...> parameters) {
  std::apply(
      [&](const Parameters&... values) {
        const void* const addresses[] = {&values...};
        const size_t sizes[] = {sizeof(Parameters)...};
        launch_hook(reinterpret_cast<const void*>(kernel), gridDim.x, gridDim.y, blockDim.x, addresses, sizes, sizeof...(Parameters));
      },
      parameters);
}

}  // namespace cuda_on_cpu

inline void __syncthreads() {
  using namespace cuda_on_cpu;
  ++running.block_arrivals;
  wait_until(running.block_arrivals, ++current_fiber().block_barriers * blockDim.x);
}

inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t value, int lane_mask) {
  using namespace cuda_on_cpu;
  if (mask != 0xffffffffu) {
    std::fprintf(stderr, "only shuffles of whole warps are emulated\n");
    std::abort();
  }
  Warp& warp = running.warps[running.current / kLanes];
  const unsigned lane = running.current % kLanes;
  const uint64_t barrier = ++current_fiber().warp_barriers;
  warp.exchanged[barrier % 2][lane] = value;
  ++warp.arrivals;
  wait_until(warp.arrivals, barrier * kLanes);
  return warp.exchanged[barrier % 2][lane ^ static_cast<unsigned>(lane_mask)];
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  using namespace cuda_on_cpu;
  const unsigned threads = config->blockDim.x;
  gridDim = dim3(limited(config->gridDim.x), limited(config->gridDim.y));
  blockDim = config->blockDim;
  if (threads == 0 || threads > 1024 || threads % kLanes || gridDim.x == 0 || gridDim.y == 0 || config->gridDim.y > 65535) {
    return last_error = cudaErrorInvalidConfiguration;
  }
  if (launch_hook != nullptr) {
    launch_by_hook(kernel, std::tuple<Parameters...>(arguments...));
    return cudaSuccess;
  }
  for (unsigned y = 0; y < gridDim.y; ++y) {
    for (unsigned x = 0; x < gridDim.x; ++x) {
      blockIdx = dim3(x, y, 0);
      run_grid_block(threads, [&] { kernel(arguments...); });
    }
  }
  return cudaSuccess;
}
