"""Writes scalars to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.system.user_error import UserError


@dataclass(frozen=True)
class WandbRun:
    """Names of a run in Weights & Biases, which chooses those that are None."""

    project: str
    entity: str | None
    name: str | None
    directory: Path | None


class WandbWriter:
    """Writes to a new run. Made on one rank only, and only with --wandb-project, so that other runs never import wandb.

    WANDB_MODE=offline and the other environment variables of wandb work as usual.
    Raises UserError if the package wandb is missing.
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
        """Consumed samples are a scalar of their own, `samples vs steps`, as in Megatron-LM."""
        samples = {} if consumed_samples is None else {"samples vs steps": consumed_samples}
        self._run.log({**scalars, **samples}, step=iteration)

    def close(self) -> None:
        self._run.finish()


def _wandb(project: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            f"--wandb-project {project} needs the package wandb, which is not installed; run `pip install wandb` or leave the flag out."
        ) from None
    return wandb
