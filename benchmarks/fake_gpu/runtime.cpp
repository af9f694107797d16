// The functions of libcudart, cuBLAS and NCCL that torch calls, for LD_PRELOAD: a GPU that computes nothing.
//
// Memory of the GPU is address space that nobody touches, so it holds zeros and takes no memory of the host. Kernels, matrix products and
// collectives do nothing. Streams, events, allocations and pinned memory have the answers that a GPU gives, and every launch, copy and wait
// is counted. So torch's dispatch, allocator, streams and NCCL groups run as they do with a GPU, without one.
//
// FAKE_GPU_COUNT, FAKE_GPU_MIB and FAKE_GPU_CAPABILITY (such as 90) in the environment describe the GPUs.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Blocks = std::map<uintptr_t, size_t>;  // bytes by address

constexpr size_t kPageBytes = 2u << 20;  // what cudaMalloc gives is a multiple of it
constexpr int kLeastPriority = 0, kGreatestPriority = -5;
constexpr int kThreadsPerBlock = 1024, kThreadsPerProcessor = 2048, kBlocksPerProcessor = 32, kWarp = 32, kRegisters = 65536;
constexpr int kSharedBytes = 48 << 10, kMostSharedBytes = 227 << 10, kSharedBytesPerProcessor = 228 << 10, kCacheBytes = 50 << 20;
constexpr int kGridX = 2147483647, kGridYZ = 65535, kBlockZ = 64;
constexpr int kCudaVersion = 13000;
constexpr int kCudnnVersion = 90000;  // so old that --attention-backend auto leaves its attention out, which needs a real GPU

int setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

struct Gpus {
  const int count = setting("FAKE_GPU_COUNT", 1);
  const size_t bytes = static_cast<size_t>(setting("FAKE_GPU_MIB", 80 << 10)) << 20;
  const int capability = setting("FAKE_GPU_CAPABILITY", 90);
  const int processors = capability == 80 ? 108 : 132;
};

const Gpus& gpus() {
  static const Gpus described;
  return described;
}

// Never destroyed: libraries call the runtime until the process has ended.
struct State {
  std::mutex mutex;
  Blocks on_device, pinned;
  std::unordered_map<const void*, std::string> kernels;  // names by the address of their launcher
  std::unordered_map<const void*, void*> symbols;
  std::map<std::string, int64_t> counts;
  size_t used = 0;
  std::string text;
};

State& state() {
  static auto* const made = new State();
  return *made;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool is_capturing = false;
thread_local bool is_capture_broken = false;  // a call came in between that a GPU cannot put into a graph

struct Call {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
std::vector<Call>& calls() {
  thread_local std::vector<Call> pushed;
  return pushed;
}

struct Event {
  Clock::time_point recorded = Clock::now();
};

struct Stream {
  int priority;
};

struct Communicator {
  int ranks, rank;
};

void count(const std::string& what) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  ++state().counts[what];
}

cudaError_t counted(const char* what) {
  count(what);
  return cudaSuccess;
}

cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) {
    last_error = error;
  }
  return error;
}

// A wait of the host, which breaks a capture that is under way in this thread.
cudaError_t wait() {
  if (is_capturing) {
    is_capture_broken = true;
    return noted(cudaErrorStreamCaptureUnsupported);
  }
  return counted("wait of the host");
}

bool holds(const Blocks& blocks, const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto found = blocks.upper_bound(address);
  return found != blocks.begin() && address - (--found)->first < found->second;
}

cudaError_t allocate(void** pointer, size_t bytes) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  const size_t whole = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  ++state().counts["allocation"];
  if (state().used + whole > gpus().bytes) {
    return cudaErrorMemoryAllocation;
  }
  void* const made = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) {
    return cudaErrorMemoryAllocation;
  }
  state().on_device[reinterpret_cast<uintptr_t>(made)] = whole;
  state().used += whole;
  *pointer = made;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  const std::lock_guard<std::mutex> hold(state().mutex);
  const auto found = state().on_device.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == state().on_device.end()) {
    return cudaErrorInvalidValue;
  }
  munmap(pointer, found->second);
  state().used -= found->second;
  state().on_device.erase(found);
  return cudaSuccess;
}

void pin(void* pointer, size_t bytes) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  state().pinned[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  ++state().counts["pinning"];
}

void unpin(void* pointer) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  state().pinned.erase(reinterpret_cast<uintptr_t>(pointer));
}

// Copies to the host bring what the GPU holds, which is zeros. The host waits for copies of memory that is not pinned.
cudaError_t copy(void* to, const void* from, size_t bytes, bool waits) {
  bool is_up;
  {
    const std::lock_guard<std::mutex> hold(state().mutex);
    is_up = holds(state().on_device, to);
    const bool is_down = holds(state().on_device, from);
    waits |= is_up != is_down && !holds(state().pinned, is_up ? from : to);
    ++state().counts[is_up && is_down ? "copy on the GPU" : is_up ? "copy to the GPU" : "copy to the host"];
  }
  if (!is_up) {
    std::memcpy(to, from, bytes);
  }
  return waits ? wait() : cudaSuccess;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  const auto found = state().kernels.find(kernel);
  ++state().counts["launch"];
  ++state().counts["kernel " + (found == state().kernels.end() ? "without a name" : found->second)];
  const bool is_grid = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= kGridX && grid.y <= kGridYZ && grid.z <= kGridYZ;
  const size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
  return noted(is_grid && threads > 0 && threads <= kThreadsPerBlock ? cudaSuccess : cudaErrorInvalidConfiguration);
}

int driver_function(...) { return 0; }

}  // namespace

extern "C" {

// Read by fake_gpu/counts.py.

// Lines of a number, a tab and a name; valid until the next call.
const char* fake_gpu_counts() {
  const std::lock_guard<std::mutex> hold(state().mutex);
  state().text.clear();
  for (const auto& [name, number] : state().counts) {
    state().text += std::to_string(number) + "\t" + name + "\n";
  }
  return state().text.c_str();
}

void fake_gpu_forget_counts() {
  const std::lock_guard<std::mutex> hold(state().mutex);
  state().counts.clear();
}

// Kernels

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* launcher, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  state().kernels[launcher] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  calls().push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Call call = calls().back();
  calls().pop_back();
  *grid = call.grid;
  *block = call.block;
  *shared = call.shared;
  *static_cast<cudaStream_t*>(stream) = call.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* launcher) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(launcher));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return launch(kernel, grid, block);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t) { return launch(kernel, grid, block); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(kernel, config->gridDim, config->blockDim);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = kThreadsPerBlock;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = gpus().capability;
  attributes->maxDynamicSharedSizeBytes = kMostSharedBytes;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t, unsigned) {
  *blocks = threads > 0 ? std::max(1, std::min(kBlocksPerProcessor, kThreadsPerProcessor / threads)) : 1;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  void*& address = state().symbols[symbol];
  if (address == nullptr) {
    address = std::calloc(1, kPageBytes);
  }
  *pointer = address;
  return cudaSuccess;
}

// Devices

cudaError_t cudaGetDeviceCount(int* found) {
  *found = gpus().count;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= gpus().count) {
    return noted(cudaErrorInvalidDevice);
  }
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  std::snprintf(text, room, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = kLeastPriority;
  if (greatest != nullptr) *greatest = kGreatestPriority;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return wait(); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> values{
      {cudaDevAttrComputeCapabilityMajor, gpus().capability / 10},
      {cudaDevAttrComputeCapabilityMinor, gpus().capability % 10},
      {cudaDevAttrMultiProcessorCount, gpus().processors},
      {cudaDevAttrMaxThreadsPerBlock, kThreadsPerBlock},
      {cudaDevAttrMaxThreadsPerMultiProcessor, kThreadsPerProcessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, kBlocksPerProcessor},
      {cudaDevAttrWarpSize, kWarp},
      {cudaDevAttrMaxGridDimX, kGridX},
      {cudaDevAttrMaxGridDimY, kGridYZ},
      {cudaDevAttrMaxGridDimZ, kGridYZ},
      {cudaDevAttrMaxBlockDimX, kThreadsPerBlock},
      {cudaDevAttrMaxBlockDimY, kThreadsPerBlock},
      {cudaDevAttrMaxBlockDimZ, kBlockZ},
      {cudaDevAttrMaxSharedMemoryPerBlock, kSharedBytes},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kMostSharedBytes},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedBytesPerProcessor},
      {cudaDevAttrMaxRegistersPerBlock, kRegisters},
      {cudaDevAttrMaxRegistersPerMultiprocessor, kRegisters},
      {cudaDevAttrL2CacheSize, kCacheBytes},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrConcurrentKernels, 1},
  };
  const auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "fake GPU of compute capability %d.%d", gpus().capability / 10, gpus().capability % 10);
  properties->totalGlobalMem = gpus().bytes;
  properties->major = gpus().capability / 10;
  properties->minor = gpus().capability % 10;
  properties->multiProcessorCount = gpus().processors;
  properties->warpSize = kWarp;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kThreadsPerBlock;
  properties->maxThreadsDim[2] = kBlockZ;
  properties->maxGridSize[0] = kGridX;
  properties->maxGridSize[1] = properties->maxGridSize[2] = kGridYZ;
  properties->maxThreadsPerMultiProcessor = kThreadsPerProcessor;
  properties->maxBlocksPerMultiProcessor = kBlocksPerProcessor;
  properties->sharedMemPerBlock = kSharedBytes;
  properties->sharedMemPerBlockOptin = kMostSharedBytes;
  properties->sharedMemPerMultiprocessor = kSharedBytesPerProcessor;
  properties->regsPerBlock = properties->regsPerMultiprocessor = kRegisters;
  properties->l2CacheSize = kCacheBytes;
  properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->textureAlignment = 512;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(driver_function);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the fake GPU";
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Memory

cudaError_t cudaMalloc(void** pointer, size_t bytes) { return noted(allocate(pointer, bytes)); }
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return noted(allocate(pointer, bytes)); }
cudaError_t cudaFree(void* pointer) { return noted(release(pointer)); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return noted(release(pointer)); }
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  *total = gpus().bytes;
  *available = gpus().bytes - state().used;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  constexpr size_t kAlignment = 4096;
  *pointer = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (*pointer == nullptr) {
    return noted(cudaErrorMemoryAllocation);
  }
  pin(*pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  unpin(pointer);
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  pin(pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  unpin(pointer);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  *attributes = {};
  attributes->device = current_device;
  if (holds(state().on_device, pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (holds(state().pinned, pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes, true); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) { return copy(to, from, bytes, false); }
cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) { return counted("copy on the GPU"); }
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return counted("clearing"); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return cudaErrorNotSupported; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }

// Streams and events. What is enqueued has always ended.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream{priority});
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, kLeastPriority); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream == nullptr ? kLeastPriority : reinterpret_cast<Stream*>(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return counted("wait of a stream"); }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event());
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  const auto elapsed = reinterpret_cast<Event*>(stop)->recorded - reinterpret_cast<Event*>(start)->recorded;
  *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  reinterpret_cast<Event*>(event)->recorded = Clock::now();
  return counted("event");
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait(); }

// Graphs. They hold nothing, because a launch computes nothing; but torch takes a null graph for none.

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  is_capturing = true;
  is_capture_broken = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  is_capturing = false;
  *graph = is_capture_broken ? nullptr : reinterpret_cast<cudaGraph_t>(&state());
  return noted(is_capture_broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = !is_capturing         ? cudaStreamCaptureStatusNone
            : is_capture_broken   ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream,
    cudaStreamCaptureStatus* status,
    unsigned long long* id,
    cudaGraph_t* graph,
    const cudaGraphNode_t**,
    const cudaGraphEdgeData**,
    size_t*) {
  if (id != nullptr) *id = 1;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(&state());
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* nodes) {
  *nodes = 1;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* graph, cudaGraph_t, unsigned long long) {
  *graph = reinterpret_cast<cudaGraphExec_t>(&state());
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return counted("launch of a graph"); }
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* nodes) {
  *nodes = 0;
  return cudaSuccess;
}

// NCCL

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int ranks, ncclUniqueId, int rank, ncclConfig_t*) {
  *communicator = reinterpret_cast<ncclComm_t>(new Communicator{ranks, rank});
  count("communicator");
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(communicator, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int ranks, int rank, int, ncclUniqueId* id, ncclConfig_t* config) {
  return ncclCommInitRankConfig(communicator, ranks, *id, rank, config);
}
ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return ncclInvalidUsage; }
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) { return ncclInvalidUsage; }
ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) { return ncclInvalidUsage; }
ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommCount(ncclComm_t communicator, int* ranks) {
  *ranks = reinterpret_cast<Communicator*>(communicator)->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  *rank = reinterpret_cast<Communicator*>(communicator)->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void**) { return ncclSuccess; }
ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t) { return "an error of the fake NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) { return allocate(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclMemFree(void* pointer) { return release(pointer) == cudaSuccess ? ncclSuccess : ncclInvalidArgument; }

#define COLLECTIVE(name, ...)           \
  ncclResult_t name(__VA_ARGS__) {      \
    count("collective " #name);         \
    return ncclSuccess;                 \
  }
COLLECTIVE(ncclAllGather, const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t)
COLLECTIVE(ncclAllReduce, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t)
COLLECTIVE(ncclAlltoAll, const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t)
COLLECTIVE(ncclBcast, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
COLLECTIVE(ncclBroadcast, const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
COLLECTIVE(ncclReduce, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t)
COLLECTIVE(ncclReduceScatter, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t)
COLLECTIVE(ncclSend, const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
COLLECTIVE(ncclRecv, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)
#undef COLLECTIVE

// cuBLAS: arguments do not matter, results are codes of success.

#define HANDLE(create, destroy)   \
  int create(void** made, ...) {  \
    *made = std::calloc(1, 64);   \
    return 0;                     \
  }                               \
  int destroy(void* made) {       \
    std::free(made);              \
    return 0;                     \
  }
HANDLE(cublasCreate_v2, cublasDestroy_v2)
HANDLE(cublasLtMatmulDescCreate, cublasLtMatmulDescDestroy)
HANDLE(cublasLtMatrixLayoutCreate, cublasLtMatrixLayoutDestroy)
HANDLE(cublasLtMatmulPreferenceCreate, cublasLtMatmulPreferenceDestroy)
#undef HANDLE
int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
size_t cublasLtGetVersion() { return 130000; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
  constexpr size_t kBytesOfResult = 96;  // cublasLtMatmulHeuristicResult_t: zeros are an algorithm without workspace
  std::memset(results, 0, kBytesOfResult);
  *found = 1;
  return 0;
}
#define ACCEPTED(name) \
  int name(...) { return 0; }
ACCEPTED(cublasSetMathMode)
ACCEPTED(cublasSetPointerMode_v2)
ACCEPTED(cublasSetStream_v2)
ACCEPTED(cublasSetWorkspace_v2)
ACCEPTED(cublasLtMatmulDescSetAttribute)
ACCEPTED(cublasLtMatrixLayoutSetAttribute)
ACCEPTED(cublasLtMatmulPreferenceSetAttribute)
#undef ACCEPTED
#define PRODUCT(name)  \
  int name(...) {      \
    count("product");  \
    return 0;          \
  }
PRODUCT(cublasLtMatmul)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
#undef PRODUCT

// cuDNN

size_t cudnnGetVersion() { return kCudnnVersion; }
}
