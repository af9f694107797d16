"""Points for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class WandbRun:
    """Where a run appears. None leaves the choice to Weights & Biases."""

    project: str
    entity: str | None
    name: str | None
    directory: Path | None


class WandbWriter:
    """Writes to a new run; made on one rank only, and only under --wandb-project: nothing else imports wandb.

    WANDB_MODE=offline and the rest of its environment work as they do everywhere.
    Raises ValueError where the package wandb is missing.
    """

    def __init__(self, run: WandbRun, arguments: Mapping[str, str]) -> None:
        wandb = _wandb(run.project)
        if run.directory is not None:
            run.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            entity=run.entity,
            name=run.name,
            dir=None if run.directory is None else str(run.directory),
            config=dict(arguments),
        )

    def write(self, scalars: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        """The axis of samples is a point of its own, `samples vs steps`, as in Megatron-LM."""
        samples = {} if consumed_samples is None else {"samples vs steps": consumed_samples}
        self._run.log({**scalars, **samples}, step=iteration)

    def close(self) -> None:
        self._run.finish()


def _wandb(project: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"--wandb-project {project} needs the package wandb, which is not installed; run `pip install wandb` or leave the flag out."
        ) from None
    return wandb
