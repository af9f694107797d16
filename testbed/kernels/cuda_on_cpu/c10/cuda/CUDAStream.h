// A stand-in for torch's header.
#pragma once

#include "cuda_runtime.h"

namespace c10::cuda {

inline cudaStream_t getCurrentCUDAStream() { return nullptr; }

}  // namespace c10::cuda
