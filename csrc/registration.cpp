// Registers all operators and their implementations on CPUs. No other source of a build without CUDA includes torch's tensors or its
// registration, which take a compiler 2 and 4 seconds per source: kernels get pointers from the ops.h of their folders.
#include "data/index_builders.h"
#include "dropout/cpu/ops.h"
#include "gaussian/cpu/ops.h"
#include "means/cpu/ops.h"
#include "ops.h"
#include "quantization/cpu/ops.h"

TORCH_LIBRARY(megatron_zpp, m) { megatron_zpp::declare_ops(m); }

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, m) {
  m.impl("encode_blocks", megatron_zpp::cpu::encode_blocks);
  m.impl("decode_blocks", megatron_zpp::cpu::decode_blocks);
  m.impl("decode_mean_blocks", megatron_zpp::cpu::decode_mean_blocks);
  m.impl("recode_mean_blocks", megatron_zpp::cpu::recode_mean_blocks);
  m.impl("encode_gaussian", megatron_zpp::cpu::encode_gaussian);
  m.impl("decode_gaussian", megatron_zpp::cpu::decode_gaussian);
  m.impl("decode_mean_gaussian", megatron_zpp::cpu::decode_mean_gaussian);
  m.impl("mean_values", megatron_zpp::cpu::mean_values);
  m.impl("drop_values", megatron_zpp::cpu::drop_values);
  m.impl("build_sample_index", megatron_zpp::data::build_sample_index);
  m.impl("build_blend_index", megatron_zpp::data::build_blend_index);
}
