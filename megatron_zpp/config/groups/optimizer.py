"""Flags of the optimizer and its schedules."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE, POSITIVE_COUNT, POSITIVE_TOKENS, TOKENS, flag, needs, when

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
CHANGING_DECAY = ("linear", "cosine")  # of --weight-decay-incr-style


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = flag(None, help="Peak learning rate.", unit="1", allowed=NOT_NEGATIVE, otherwise="3e-4, with a notice")
    min_lr: float = flag(0.0, help="Learning rate at the end of the decay.", unit="1", allowed=NOT_NEGATIVE)
    lr_decay_style: str = flag(
        "linear",
        help="Shape of the decay; constant is assumed when neither data nor length is given.",
        allowed=LR_STYLES,
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        help="Shape of the annealing that ends a WSD schedule.",
        allowed=("exponential", "linear", "cosine", "minus_sqrt"),
        needs=needs(lr_decay_style="WSD"),
    )
    lr_wsd_decay_iters: int | None = flag(
        None,
        help="Length of the annealing of a WSD schedule, which ends with the decay.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        needs=needs(lr_decay_style="WSD"),
    )
    lr_wsd_decay_samples: int | None = flag(
        None,
        help="Length of the annealing in samples, with --train-samples.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        needs=needs(lr_decay_style="WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, help="Iterations until the decay ends, warmup included.", unit="iterations", allowed=POSITIVE_COUNT, otherwise="--train-iters"
    )
    lr_decay_samples: int | None = flag(
        None, help="--lr-decay-iters in samples, with --train-samples.", unit="samples", allowed=POSITIVE_COUNT, otherwise="--train-samples"
    )
    lr_decay_tokens: int | None = flag(None, help="--lr-decay-iters in tokens.", unit="tokens", allowed=POSITIVE_TOKENS)
    lr_warmup_iters: int = flag(0, help="Length of the linear warmup.", unit="iterations", allowed=COUNT)
    lr_warmup_samples: int = flag(0, help="Length of the warmup in samples, with --train-samples.", unit="samples", allowed=COUNT)
    lr_warmup_tokens: int = flag(0, help="Length of the warmup in tokens.", unit="tokens", allowed=TOKENS)
    lr_warmup_fraction: float | None = flag(
        None,
        help="Length of the warmup as a fraction of the decay (--lr-decay-iters); excludes the other --lr-warmup lengths.",
        unit="1",
        allowed=FRACTION,
    )
    lr_warmup_init: float = flag(0.0, help="Learning rate at the start of the warmup.", unit="1", allowed=NOT_NEGATIVE)
    weight_decay: float = flag(
        0.01,
        help="Decoupled weight decay; one-dimensional parameters have none.",
        unit="1",
        allowed=NOT_NEGATIVE,
        without_effect=when(weight_decay_incr_style=CHANGING_DECAY),
    )
    weight_decay_incr_style: str = flag(
        "constant",
        help="Shape of the change of weight decay from --start-weight-decay to --end-weight-decay.",
        allowed=("constant", *CHANGING_DECAY),
    )
    start_weight_decay: float = flag(
        None,
        help="Weight decay at the start, if it changes.",
        unit="1",
        allowed=NOT_NEGATIVE,
        otherwise="--weight-decay",
        needs=needs(weight_decay_incr_style=CHANGING_DECAY, instead="--weight-decay"),
    )
    end_weight_decay: float = flag(
        None,
        help="Weight decay at the end, if it changes.",
        unit="1",
        allowed=NOT_NEGATIVE,
        otherwise="--weight-decay",
        needs=needs(weight_decay_incr_style=CHANGING_DECAY, instead="--weight-decay"),
    )
    weight_decay_incr_samples: int = flag(
        None,
        help="Samples over which weight decay changes.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        otherwise="the length of training",
        needs=needs(weight_decay_incr_style=CHANGING_DECAY, instead="--weight-decay"),
    )
    clip_grad: float = flag(1.0, help="Largest global L2 norm of the gradient; 0 turns clipping off.", unit="1", allowed=NOT_NEGATIVE)
    adam_beta1: float = flag(0.9, help="Decay of Adam's first moment.", unit="1", allowed=FRACTION)
    adam_beta2: float = flag(0.999, help="Decay of Adam's second moment.", unit="1", allowed=FRACTION)
    adam_eps: float = flag(1e-8, help="Added to the root of Adam's second moment.", unit="1", allowed=POSITIVE)
    optimizer: str = flag("adam", help="Optimizer (AdamW on fp32 main weights).", allowed=("adam",))
    optimizer_backend: str = flag(
        "torch",
        help="Kernels that update weights and compute gradient norms: torch's fused AdamW and fp64 sums, or NVIDIA Apex's FusedAdam and "
        "multi-tensor L2 norm (GPUs only, built from NVIDIA's sources).",
        allowed=("torch", "apex"),
    )
