// Registers the implementations on GPUs.
#include <torch/library.h>

#include "../dropout/cuda/ops.h"
#include "../gaussian/cuda/ops.h"
#include "../means/cuda/ops.h"
#include "../quantization/cuda/ops.h"
#include "../softmax/cuda/ops.h"

namespace megatron_zpp::cuda {

void implement_ops(torch::Library& m) {
  m.impl("encode_blocks", encode_blocks);
  m.impl("decode_blocks", decode_blocks);
  m.impl("decode_mean_blocks", decode_mean_blocks);
  m.impl("recode_mean_blocks", recode_mean_blocks);
  m.impl("encode_gaussian", encode_gaussian);
  m.impl("decode_gaussian", decode_gaussian);
  m.impl("decode_mean_gaussian", decode_mean_gaussian);
  m.impl("mean_values", mean_values);
  m.impl("drop_values", drop_values);
  m.impl("softmax_parts", softmax_parts);
  m.impl("softmax_gradient", softmax_gradient);
}

}  // namespace megatron_zpp::cuda

TORCH_LIBRARY_IMPL(megatron_zpp, CUDA, m) { megatron_zpp::cuda::implement_ops(m); }
