"""Reads the configuration of the model and of its data from a checkpoint's manifest."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_zpp.checkpoint.checkpoint_args import MACHINE_FIELDS
from megatron_zpp.checkpoint.folders import find_checkpoint, find_part
from megatron_zpp.checkpoint.manifest import CheckpointError, Manifest
from megatron_zpp.checkpoint.older_flags import flags_of
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.config.flag import spelling_of
from megatron_zpp.config.schema import DataConfig, ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.parallel.specs import UnitSpec
from megatron_zpp.system.outside import WHOLE_NUMBER_LIMIT

Group = TypeVar("Group", DataConfig, ModelConfig)
FORMER_MACHINE_FIELDS = {"checkpoint_activations"}  # in checkpoints from before --recompute-granularity


def open_checkpoint(directory: Path, step: int | None, *others: Path) -> CheckpointReader:
    """The checkpoint of iteration `step`, or the latest if step is None.

    others: further directories, if nodes have saved on their own disks, each with a part of the same checkpoint.
    Raises CheckpointError if there is none, or if a part is missing.
    """
    folder = find_checkpoint(directory, step)
    if folder is None:
        raise CheckpointError(
            f"--load {directory} holds no checkpoint; give the folder that --save of the training named, the parent of its iter_ folders."
        )
    return CheckpointReader(folder, beside=[find_part(folder, other) for other in others])


def model_flags(manifest: Manifest) -> ModelConfig:
    """The model's configuration. Flags that say only how the model is computed are left at their defaults."""
    return _group(ModelConfig, manifest, "model", left_out=MACHINE_FIELDS | FORMER_MACHINE_FIELDS)


def data_flags(manifest: Manifest) -> DataConfig:
    return _group(DataConfig, manifest, "data", left_out=set())


def check_tokenizer_files(data: DataConfig, names: Iterable[str]) -> None:
    """Raises CheckpointError if a tokenizer's file that the checkpoint's run had is not there. names: of the fields to check."""
    for name in names:
        path = getattr(data, name)
        if path is None or Path(path).exists():
            continue
        place = "does not exist on this machine" if Path(path).is_absolute() else "is relative to the folder where that run was started"
        flag = spelling_of(name)
        raise CheckpointError(f"{flag} {path} is that of the checkpoint's run, and {place}; give the file with {flag}.")


def padded_vocab_size(manifest: Manifest) -> int:
    rows = _flags(manifest, "padded_vocab_size")
    if type(rows) is not int or not 1 <= rows < WHOLE_NUMBER_LIMIT:
        raise CheckpointError(
            f"the manifest of iteration {manifest.iteration}: padded_vocab_size must be a whole number from 1 to 2^63 - 1, not {rows}; "
            "choose another checkpoint."
        )
    return rows


def units_of(model: ModelConfig, padded_vocab: int) -> tuple[UnitSpec, ...]:
    """The parameters of a model of this configuration, by unit. Nothing is allocated."""
    return GPT(model, padded_vocab, seed=0, dtype=torch.float32).unit_specs()


def _flags(manifest: Manifest, name: str) -> Any:
    if name not in manifest.flags:
        raise CheckpointError(f"the manifest of iteration {manifest.iteration} has no flags for {name}; choose another checkpoint.")
    return manifest.flags[name]


def _group(kind: type[Group], manifest: Manifest, name: str, left_out: AbstractSet[str]) -> Group:
    _flags(manifest, name)
    try:
        flags = flags_of(manifest, name)
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in flags.items() if name not in left_out
        }
        return kind(**fields)
    except (TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the {name} flags in the manifest of iteration {manifest.iteration} are not those of this program ({error})."
        ) from None
