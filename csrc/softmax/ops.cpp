// Declares the operators of the loss, which have kernels for GPUs only. Implementations are registered beside the kernels, fake kernels in
// megatron_zpp/ops/extension.py.
//
// logits, gradient      [tokens, columns]  fp32, bf16 or fp16, of the same dtype; inner dim contiguous, any row stride; they may be the same
// labels                [tokens]           int64, entries of the whole vocabulary; column 0 of the logits is its entry `first`
// largest, sums, label  [tokens]           fp32, contiguous, as is grad_loss
#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(megatron_zpp, m) {
  m.def(
      "softmax_parts(Tensor logits, Tensor labels, int first, int entries, Tensor(a!) largest, Tensor(b!) sums, Tensor(c!) label) -> ()");
  m.def(
      "softmax_gradient(Tensor logits, Tensor labels, int first, Tensor largest, Tensor sums, Tensor grad_loss, Tensor(a!) gradient) -> ()");
}
