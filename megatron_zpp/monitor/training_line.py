"""Formats the log lines that scripts parse; labels, order and spaces are those of Megatron-DeepSpeed, or of Megatron-LM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime

from megatron_zpp.monitor.interval_report import IntervalReport


def training_line(report: IntervalReport, *, with_throughput: bool = False) -> str:
    """One line of fields separated by ` | `. Values that are not finite print as nan and inf, so no field is ever missing.

    Fields that Megatron-DeepSpeed does not have are last, so that scripts can read its fields by position.
    """
    fields = [
        f"iteration {report.iteration:8d}/{report.train_iters:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"consumed tokens: {report.consumed_tokens:12d}",
        f"elapsed time per iteration (ms): {report.elapsed_ms_per_iteration:.1f}",
        f"learning rate: {_scientific(report.learning_rate)}",
        f"global batch size: {report.global_batch_size:5d}",
        f"lm loss: {_scientific(report.lm_loss)}",
        f"loss scale: {report.loss_scale:.1f}",
        f"grad norm: {report.grad_norm:.3f}",
        *_optional("num zeros: {:.1f}", report.num_zeros),
        *_optional("params norm: {:.3f}", report.params_norm),
        f"actual seqlen: {report.seq_length:5d}",
        f"number of skipped iterations: {report.skipped_iterations:3d}",
        f"number of nan iterations: {report.nan_iterations:3d}",
        f"samples per second: {report.samples_per_second:.3f}",
        f"tokens per gpu per second (tgs): {report.tokens_per_gpu_per_second:.3f}",
        f"TFLOPs: {report.tflops_per_gpu:.2f}",
        *(_throughput(report) if with_throughput else ()),
        *_optional("MFU: {:.1%}", report.mfu),
        *_optional("HFU: {:.1%}", report.hfu),
        f"ETA: {_duration(report.eta_seconds)}",
    ]
    return " " + " | ".join(fields) + " |"


def megatron_lm_line(report: IntervalReport, printed_at: datetime, *, with_throughput: bool = False) -> str:
    """The same in the form of Megatron-LM: date and time come first, and throughput before the learning rate."""
    fields = [
        f"iteration {report.iteration:8d}/{report.train_iters:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {report.elapsed_ms_per_iteration:.1f}",
        *(_throughput(report) if with_throughput else ()),
        f"learning rate: {_scientific(report.learning_rate)}",
        f"global batch size: {report.global_batch_size:5d}",
        f"lm loss: {_scientific(report.lm_loss)}",
        f"loss scale: {report.loss_scale:.1f}",
        f"grad norm: {report.grad_norm:.3f}",
        *_optional("num zeros: {:.1f}", report.num_zeros),
        *_optional("params norm: {:.3f}", report.params_norm),
        f"number of skipped iterations: {report.skipped_iterations:3d}",
        f"number of nan iterations: {report.nan_iterations:3d}",
    ]
    return f" [{printed_at:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"


def validation_lines(iteration: int, lm_loss: float, *, set_name: str = "", drawn_from: str = "") -> str:
    """Three lines: loss and perplexity between lines of dashes.

    set_name: of one of several validation sets. drawn_from: ` on validation set` or ` on test set` after training.
    """
    perplexity = perplexity_of(lm_loss)
    line = (
        f" {validation_name(set_name)} loss at iteration {iteration}{drawn_from} | lm loss value: {_scientific(lm_loss)}"
        f" | lm loss PPL: {_scientific(perplexity)} | "
    )
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def validation_name(set_name: str) -> str:
    """`validation`, or `validation-NAME` if there are several sets."""
    return f"validation-{set_name}" if set_name else "validation"


def samples_line(consumed_samples: Mapping[str, int]) -> str:
    """The number of samples consumed from each corpus, and its share."""
    total = max(1, sum(consumed_samples.values()))
    fields = (f"{source}: {count} ({100 * count / total:.2f} %)" for source, count in consumed_samples.items())
    return f" consumed samples per source | {' | '.join(fields)} |"


def perplexity_of(lm_loss: float) -> float:
    """exp(loss), with the loss limited to 20 as in Megatron; NaN for NaN."""
    return lm_loss if math.isnan(lm_loss) else math.exp(min(20.0, lm_loss))


def _throughput(report: IntervalReport) -> tuple[str, ...]:
    return _optional("throughput per GPU (TFLOP/s/GPU): {:.1f}", report.model_tflops_per_gpu)


def _optional(field: str, value: float | None) -> tuple[str, ...]:
    return () if value is None else (field.format(value),)


def _duration(seconds: float) -> str:
    """`1d 02h 03m 04s`, without colons, because a colon ends the name of a field."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour:02d}h {minute:02d}m {second:02d}s"


def _scientific(value: float) -> str:
    text = f"{value:.6E}"
    return text if math.isfinite(value) else text.lower()
