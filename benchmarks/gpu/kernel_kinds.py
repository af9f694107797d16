"""Sorts the kernels of a profile into the parts of a step (no torch). Names are those of libraries' kernels and of torch's operators."""

from __future__ import annotations

MATRIX, ATTENTION, FUSED_LOSS, OTHER = "matrix products", "attention", "fused loss", "everything else"
# Parts of names in lower case; the first kind that has one counts.
KINDS = {
    FUSED_LOSS: ("softmax_parts_kernel", "softmax_gradient_kernel"),
    "quantization and dropout": (
        "megatron_zpp",
        "encode_kernel",
        "decode_kernel",
        "decode_mean_kernel",
        "recode_mean_kernel",
        "drop_kernel",
    ),
    "collectives": ("nccl",),
    ATTENTION: ("flash", "fmha", "attention", "cudnn_generated", "sdpa"),
    MATRIX: ("gemm", "nvjet", "cutlass", "xmma", "wgmma", "cublas", "splitk", "aten::mm", "aten::addmm", "aten::bmm"),
    "optimizer": ("multi_tensor", "multitensor", "adam"),
    "norms": ("layer_norm", "layernorm", "rms_norm", "rmsnorm"),
    "loss": ("softmax", "nll_loss", "logsumexp", "cross_entropy"),
    "embedding": ("embedding", "indexselect", "index_select", "sort", "radix"),
    "copies and fills": ("memcpy", "memset", "copy", "fill", "cat_array", "catarray", "foreach"),
    "sums": ("reduce",),
    "other elementwise": ("elementwise", "triton", "unrolled", "vectorized"),
}
NAMES = (*KINDS, OTHER)


def kind_of(kernel: str) -> str:
    lowered = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lowered for part in parts)), OTHER)


def attention_kernels(kernels: list[str]) -> list[str]:
    """Those that compute attention, each once, shortened."""
    return sorted({kernel[:100] for kernel in kernels if kind_of(kernel) == ATTENTION})
