"""TensorBoard points under Megatron-LM's tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_zpp.monitor.interval_report import IntervalReport
from megatron_zpp.monitor.training_line import perplexity_of


class TensorboardWriter:
    """Writes to `directory`; made on one rank only, and only under --tensorboard-dir: nothing else imports tensorboard.

    Raises ValueError where the package tensorboard is missing.
    """

    def __init__(self, directory: str, queue_size: int) -> None:
        self._writer = _open_writer(directory, queue_size)

    def write_arguments(self, arguments: Mapping[str, str]) -> None:
        for name, value in arguments.items():
            self._writer.add_text(name, value, global_step=0)

    def write_interval(self, report: IntervalReport) -> None:
        scalars = {
            "learning-rate": report.learning_rate,
            "batch-size": report.global_batch_size,
            "lm loss": report.lm_loss,
            "loss-scale": report.loss_scale,
            "world-size": report.world_size,
            "grad-norm": report.grad_norm,
        }
        for tag, value in scalars.items():
            self._write_against_both(tag, value, report.iteration, report.consumed_samples)
        self._writer.add_scalar("iteration-time", report.elapsed_ms_per_iteration / 1000.0, report.iteration)  # seconds, as Megatron-LM
        self._writer.add_scalar("throughput", report.tflops_per_gpu, report.iteration)
        self._writer.add_scalar("mem-max-allocated-bytes", report.max_memory_bytes, report.iteration)

    def write_validation(self, iteration: int, consumed_samples: int, lm_loss: float, set_name: str = "") -> None:
        tag = f"lm loss validation {set_name}".rstrip()
        self._write_against_both(tag, lm_loss, iteration, consumed_samples)
        self._write_against_both(f"{tag} ppl", perplexity_of(lm_loss), iteration, consumed_samples)

    def close(self) -> None:
        self._writer.close()

    def _write_against_both(self, tag: str, value: float, iteration: int, consumed_samples: int) -> None:
        self._writer.add_scalar(tag, value, iteration)
        self._writer.add_scalar(f"{tag} vs samples", value, consumed_samples)


def _open_writer(directory: str, queue_size: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            f"--tensorboard-dir {directory} needs the package tensorboard, which is not installed; "
            "run `pip install tensorboard` or leave the flag out."
        ) from None
    return SummaryWriter(log_dir=directory, max_queue=queue_size)
