"""The scalars of a run, for any writer: those of Megatron-LM under its tags, and two groups of this program.

TensorBoard sorts groups by name, capitals first, and shows the first two of them opened: LOSS and TRAFFIC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_zpp.monitor.interval_report import IntervalReport
from megatron_zpp.monitor.training_line import perplexity_of, validation_name

LOSS, TRAFFIC = "Loss", "Traffic"  # the part of a tag before "/" is its group
NODE_KEYS = ("inter_node_bytes", "inter_node_bytes_per_iteration", "intra_node_bytes")
SHARED_KEYS = ("tensor_link_bytes", "context_link_bytes", "context_inter_node_bytes")  # 0 in runs without these links


@dataclass(frozen=True)
class ScalarChoice:
    """Which optional scalars are written; the others always are."""

    learning_rate: bool = True
    loss_scale: bool = True
    world_size: bool = False
    memory: bool = False
    validation_ppl: bool = False


class ScalarWriter(Protocol):
    """Writes scalars, for example to TensorBoard."""

    def write(self, scalars: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        """Writes the scalars against `iteration`, and with consumed_samples also against consumed samples."""

    def close(self) -> None:
        """Writes what is still buffered."""


def interval_scalars(report: IntervalReport, choice: ScalarChoice) -> dict[str, float]:
    """Megatron-LM's scalars that are drawn against iterations and against samples."""
    scalars = {
        "learning-rate": report.learning_rate if choice.learning_rate else None,
        "batch-size": report.global_batch_size,
        "lm loss": report.lm_loss,
        "loss-scale": report.loss_scale if choice.loss_scale else None,
        "world-size": report.world_size if choice.world_size else None,
        "grad-norm": report.grad_norm,
        "num-zeros": report.num_zeros,
        "params-norm": report.params_norm,
    }
    return _known(scalars)


def iteration_scalars(report: IntervalReport, choice: ScalarChoice) -> dict[str, float]:
    """Scalars that are drawn against iterations only: the loss again, the bytes of each link, and Megatron-LM's.

    Times are in seconds and the throughput counts model FLOPs, as in Megatron-LM.
    """
    logged = report.json_object()
    scalars: dict[str, float | None] = {
        f"{LOSS}/training": report.lm_loss,
        **{f"{TRAFFIC}/{key}": logged[key] for key in NODE_KEYS},
        **{f"{TRAFFIC}/{key}": logged[key] or None for key in SHARED_KEYS},
        "iteration-time": report.elapsed_ms_per_iteration / 1000.0,
        "throughput": report.model_tflops_per_gpu,
    }
    if choice.memory:
        scalars |= {
            "mem-reserved-bytes": report.memory.reserved_bytes,
            "mem-allocated-bytes": report.memory.allocated_bytes,
            "mem-max-allocated-bytes": report.memory.max_allocated_bytes,
            "mem-allocated-count": report.memory.allocated_count,
        }
    return _known(scalars)


def validation_loss(lm_loss: float, *, set_name: str = "") -> dict[str, float]:
    """The loss of a validation beside that of training, drawn against iterations only. set_name: empty if there is only one set."""
    return {f"{LOSS}/{validation_name(set_name)}": lm_loss}


def validation_scalars(lm_loss: float, choice: ScalarChoice, *, set_name: str = "") -> dict[str, float]:
    """Megatron-LM's scalars of a validation, drawn against iterations and against samples. set_name: empty if there is only one set."""
    tag = f"lm loss {validation_name(set_name)}"
    scalars = {tag: lm_loss}
    if choice.validation_ppl:
        scalars[f"{tag} ppl"] = perplexity_of(lm_loss)
    return scalars


def timer_scalars(milliseconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Scalars of timers, drawn against iterations: the longest time of all ranks in seconds. milliseconds: of each timer, one per rank."""
    return {f"{name}-time": max(of_ranks) / 1000.0 for name, of_ranks in milliseconds.items()}


def _known(scalars: Mapping[str, float | None]) -> dict[str, float]:
    return {tag: value for tag, value in scalars.items() if value is not None}
