"""Writes scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_zpp.system.user_error import UserError


class TensorboardWriter:
    """Writes to `directory`. Made on one rank only, and only with --tensorboard-dir, so that other runs never import tensorboard.

    arguments: of the run, written as texts.
    Raises UserError if the package tensorboard is missing.
    """

    def __init__(self, directory: str, queue_size: int, arguments: Mapping[str, str]) -> None:
        self._writer = _open_writer(directory, queue_size)
        for name, value in arguments.items():
            self._writer.add_text(name, value, global_step=0)

    def write(self, scalars: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, iteration)
            if consumed_samples is not None:
                self._writer.add_scalar(f"{tag} vs samples", value, consumed_samples)

    def close(self) -> None:
        self._writer.close()


def _open_writer(directory: str, queue_size: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            f"--tensorboard-dir {directory} needs the package tensorboard, which is not installed; "
            "run `pip install tensorboard` or leave the flag out."
        ) from None
    return SummaryWriter(log_dir=directory, max_queue=queue_size)
