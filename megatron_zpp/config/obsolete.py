"""Flags of older Megatron and DeepSpeed scripts: accepted without effect, or refused with the name of what replaced them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptedFlag:
    """A flag that changes nothing. num_values: words that follow it, 0 or 1."""

    num_values: int
    reason: str


ONE_TENSOR_RANK = "inputs of recomputed blocks are divided among tensor-parallel ranks, of which there is one"
ACCEPTED: dict[str, AcceptedFlag] = {
    "--local-rank": AcceptedFlag(1, "the launcher's LOCAL_RANK decides"),
    "--local_rank": AcceptedFlag(1, "the launcher's LOCAL_RANK decides"),
    "--deepspeed": AcceptedFlag(0, "--zero-stage alone chooses the sharding"),
    "--deepspeed-activation-checkpointing": AcceptedFlag(0, "--recompute-granularity turns recomputation on"),
    "--partition-activations": AcceptedFlag(0, ONE_TENSOR_RANK),
    "--distribute-saved-activations": AcceptedFlag(0, ONE_TENSOR_RANK),
    "--distribute-checkpointed-activations": AcceptedFlag(0, ONE_TENSOR_RANK),
    "--contigious-checkpointing": AcceptedFlag(0, "torch's allocator keeps the inputs of recomputed blocks"),
    "--synchronize-each-layer": AcceptedFlag(0, "a block's kernels are in order on their stream"),
    "--no-pipeline-parallel": AcceptedFlag(0, "there is no pipeline engine"),
    "--DDP-impl": AcceptedFlag(1, "--zero-stage 0 is data parallelism"),
    "--use-cpu-initialization": AcceptedFlag(0, "weights are the same on every device and world size"),
    "--use-mcore-models": AcceptedFlag(0, "there is one model"),
    "--transformer-impl": AcceptedFlag(1, "there is one model"),
    "--use-flash-attn": AcceptedFlag(0, "attention uses the fastest kernel torch offers; --attention-backend flash insists on flash"),
    "--use-flash-attn-v1": AcceptedFlag(0, "there are torch's kernels, see --attention-backend"),
    "--use-flash-attn-v2": AcceptedFlag(0, "there are torch's kernels, see --attention-backend"),
    "--use-flash-attn-triton": AcceptedFlag(0, "there are torch's kernels, see --attention-backend"),
    "--openai-gelu": AcceptedFlag(0, "GELU always has its tanh form"),
    "--no-bias-swiglu-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-rope-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-persist-layer-norm": AcceptedFlag(0, "there is one kernel per norm, see --norm-backend"),
    "--attention-softmax-in-fp32": AcceptedFlag(0, "the attention kernel accumulates in fp32"),
    "--no-query-key-layer-scaling": AcceptedFlag(0, "scaling by layer is always off"),
    "--no-masked-softmax-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-bias-gelu-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-bias-dropout-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-gradient-accumulation-fusion": AcceptedFlag(0, "gradients always accumulate in fp32"),
    "--no-save-rng": AcceptedFlag(0, "randomness follows from --seed and the sample, there is no state to save"),
    "--no-load-rng": AcceptedFlag(0, "randomness follows from --seed and the sample, there is no state to load"),
    "--ckpt-format": AcceptedFlag(1, "there is one format, safetensors and a manifest"),
    "--use-dist-ckpt": AcceptedFlag(0, "checkpoints are always sharded"),
    "--universal-checkpoint": AcceptedFlag(0, "every checkpoint can be loaded at any world size and stage"),
    "--data-impl": AcceptedFlag(1, "data files are always memory-mapped"),
    "--mmap-warmup": AcceptedFlag(0, "data files are read where and when they are needed"),
    "--no-mmap-bin-files": AcceptedFlag(0, "data files are always memory-mapped"),
    "--num-dataset-builder-threads": AcceptedFlag(1, "each node builds an index once, and keeps it"),
    "--no-create-attention-mask-in-dataloader": AcceptedFlag(0, "no mask is made that attention does not need"),
    "--trust-remote-code": AcceptedFlag(0, "tokenizers are read from files, no code of others runs"),
}

REFUSED: dict[str, str] = {
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--warmup": "use --lr-warmup-fraction",
    "--checkpoint-in-cpu": "use a higher --recompute-num-layers, which keeps fewer inputs of recomputed blocks on the device",
    "--profile-backward": "leave it out, backward is measured with everything else",
    "--use-distributed-optimizer": "use --zero-stage 1",
    "--quick-geglu": "use --swiglu, which gates as well",
    "--apply-residual-connection-post-layernorm": "leave it out, norms stand before attention and feed-forward layer",
    "--multi-latent-attention": "use --num-query-groups, which makes keys and values smaller as well",
    "--onnx-safe": "leave it out, weights leave with tools/convert_to_hf.py",
    "--num-experts": "leave it out, mixtures of experts are not available",
    "--fp8-format": "use --bf16, fp8 is not available",
}


def notice(spelling: str) -> str:
    """The line about an accepted flag that changes nothing."""
    return f"accepted, has no effect here: {spelling} ({ACCEPTED[spelling].reason})"
