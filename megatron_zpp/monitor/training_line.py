"""The lines that scripts read: labels, order and spaces of Megatron-DeepSpeed, verbatim."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_zpp.monitor.interval_report import IntervalReport


def training_line(report: IntervalReport) -> str:
    """One line of ` | `-separated fields. A field never vanishes: values that are not finite print as nan and inf."""
    fields = (
        f"iteration {report.iteration:8d}/{report.train_iters:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"consumed tokens: {report.consumed_tokens:12d}",
        f"elapsed time per iteration (ms): {report.elapsed_ms_per_iteration:.1f}",
        f"learning rate: {_scientific(report.learning_rate, 3)}",
        f"global batch size: {report.global_batch_size:5d}",
        f"lm loss: {_scientific(report.lm_loss, 6)}",
        f"loss scale: {report.loss_scale:.1f}",
        f"grad norm: {report.grad_norm:.3f}",
        f"actual seqlen: {report.seq_length:5d}",
        f"number of skipped iterations: {report.skipped_iterations:3d}",
        f"number of nan iterations: {report.nan_iterations:3d}",
        f"samples per second: {report.samples_per_second:.3f}",
        f"tokens per gpu per second (tgs): {report.tokens_per_gpu_per_second:.3f}",
        f"TFLOPs: {report.tflops_per_gpu:.2f}",
    )
    return " " + " | ".join(fields) + " |"


def validation_lines(iteration: int, lm_loss: float, *, drawn_from: str = "") -> str:
    """Three lines: loss and perplexity between dashes. drawn_from: ` on validation set` or ` on test set` at the end of training."""
    perplexity = perplexity_of(lm_loss)
    line = (
        f" validation loss at iteration {iteration}{drawn_from} | lm loss value: {_scientific(lm_loss, 6)}"
        f" | lm loss PPL: {_scientific(perplexity, 6)} | "
    )
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def samples_line(consumed_samples: Mapping[str, int]) -> str:
    """The samples consumed of each corpus, and their shares."""
    total = max(1, sum(consumed_samples.values()))
    fields = (f"{source}: {count} ({100 * count / total:.2f} %)" for source, count in consumed_samples.items())
    return f" consumed samples per source | {' | '.join(fields)} |"


def perplexity_of(lm_loss: float) -> float:
    """exp(loss), the loss cut off at 20 as Megatron does; NaN for NaN."""
    return lm_loss if math.isnan(lm_loss) else math.exp(min(20.0, lm_loss))


def _scientific(value: float, digits: int) -> str:
    text = f"{value:.{digits}E}"
    return text if math.isfinite(value) else text.lower()
