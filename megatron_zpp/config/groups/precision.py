"""Flags of the working precision and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import POSITIVE, POSITIVE_COUNT, flag, unless, when


@dataclass(frozen=True)
class PrecisionConfig:
    """Number format of weights and activations, by default fp32. Main weights are always fp32."""

    fp16: bool = flag(False, help="Train in fp16 with a loss scale; excludes --bf16.")
    bf16: bool = flag(False, help="Train in bf16; excludes --fp16.")
    loss_scale: float | None = flag(
        None,
        help="Constant loss scale for fp16; without it the scale is dynamic.",
        unit="1",
        allowed=POSITIVE,
        without_effect=unless("fp16"),
    )
    initial_loss_scale: float = flag(
        2.0**32,
        help="First dynamic loss scale; 65536 is assumed with --deepspeed-config, and when neither data nor length is given.",
        unit="1",
        allowed=POSITIVE,
        without_effect=unless("fp16") + when("loss_scale"),
    )
    min_loss_scale: float = flag(
        1.0, help="Smallest dynamic loss scale.", unit="1", allowed=POSITIVE, without_effect=unless("fp16") + when("loss_scale")
    )
    loss_scale_window: int = flag(
        1000,
        help="Steps without overflow before the loss scale doubles.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        without_effect=unless("fp16") + when("loss_scale"),
    )
    hysteresis: int = flag(
        2,
        help="Overflows until the loss scale halves; every later one halves it again, until the scale doubles.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        without_effect=unless("fp16") + when("loss_scale"),
    )
