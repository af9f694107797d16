"""Flags of older Megatron and DeepSpeed scripts: accepted without effect, or refused with the name of what replaced them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptedFlag:
    """A flag that changes nothing. num_values: words that follow it, 0 or 1."""

    num_values: int
    reason: str


ACCEPTED: dict[str, AcceptedFlag] = {
    "--local-rank": AcceptedFlag(1, "the launcher's LOCAL_RANK decides"),
    "--local_rank": AcceptedFlag(1, "the launcher's LOCAL_RANK decides"),
    "--deepspeed": AcceptedFlag(0, "--zero-stage alone chooses the sharding"),
    "--deepspeed-activation-checkpointing": AcceptedFlag(0, "--checkpoint-activations turns recomputation on"),
    "--no-pipeline-parallel": AcceptedFlag(0, "there is no pipeline engine"),
    "--DDP-impl": AcceptedFlag(1, "--zero-stage 0 is data parallelism"),
    "--use-cpu-initialization": AcceptedFlag(0, "weights are the same on every device and world size"),
    "--use-mcore-models": AcceptedFlag(0, "there is one model"),
    "--transformer-impl": AcceptedFlag(1, "there is one model"),
    "--use-flash-attn": AcceptedFlag(0, "attention always uses the fastest kernel torch offers"),
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
    "--log-batch-size-to-tensorboard": AcceptedFlag(0, "the batch size is always among the points"),
    "--no-barrier-with-level-1-timing": AcceptedFlag(0, "timers never wait for other ranks"),
    "--barrier-with-L1-time": AcceptedFlag(0, "timers never wait for other ranks"),
    "--use-pytorch-profiler": AcceptedFlag(0, "--profile always uses torch's"),
    "--trust-remote-code": AcceptedFlag(0, "tokenizers are read from files, no code of others runs"),
}

REFUSED: dict[str, str] = {
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--warmup": "use --lr-warmup-fraction",
    "--recompute-granularity": "use --checkpoint-activations, which recomputes every block",
    "--recompute-activations": "use --checkpoint-activations, which recomputes every block",
    "--swiglu": "leave it out, blocks have GELU",
    "--normalization": "leave it out, blocks have LayerNorm",
    "--position-embedding-type": "leave it out, positions are learned",
    "--use-rotary-position-embeddings": "leave it out, positions are learned",
    "--group-query-attention": "leave it out, every head has keys and values of its own",
    "--num-query-groups": "leave it out, every head has keys and values of its own",
    "--use-distributed-optimizer": "use --zero-stage 1",
    "--num-experts": "leave it out, mixtures of experts are not available",
    "--log-optimizer-states-to-tensorboard": "use --log-params-norm, statistics of Adam's moments are not logged",
    "--fp8-format": "use --bf16, fp8 is not available",
}


def notice(spelling: str) -> str:
    """The line about an accepted flag that changes nothing."""
    return f"accepted, has no effect here: {spelling} ({ACCEPTED[spelling].reason})"
