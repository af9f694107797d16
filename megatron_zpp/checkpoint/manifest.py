"""The manifest of a checkpoint: which file holds which piece of which parameter, and what a run needs to go on exactly.

DIR/latest_checkpointed_iteration.txt      the iteration to load, as Megatron has it
DIR/iter_0000100/manifest.json             this manifest
DIR/iter_0000100/rank_00000.safetensors    one file per rank: fp32 tensors named `<parameter>.<state>`, one dimension each
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = "megatron_zpp checkpoint"
FORMAT_VERSION = 1
LATEST_FILE = "latest_checkpointed_iteration.txt"
MANIFEST_FILE = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or is not there; the text names the file and the remedy."""


@dataclass(frozen=True)
class StoredPiece:
    """Elements [start, stop) of a flattened parameter, held by `file` for every state the checkpoint has."""

    parameter: str
    start: int
    stop: int
    file: str


@dataclass(frozen=True)
class Manifest:
    """states: what is stored of every parameter. run: what a resumed run needs beside the tensors. flags: the resolved configuration."""

    iteration: int
    consumed_samples: int
    shapes: Mapping[str, tuple[int, ...]]
    states: tuple[str, ...]
    pieces: tuple[StoredPiece, ...]
    run: Mapping[str, Any]
    flags: Mapping[str, Any]
    topology: Mapping[str, int]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in the folder of one iteration. Raises CheckpointError where it is missing, damaged or of another format."""
    path = folder / MANIFEST_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("format") != FORMAT:
            raise CheckpointError(f"{path} is not a manifest of {FORMAT}; give the folder of a checkpoint of this program")
        version = fields.pop("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, this program reads {FORMAT_VERSION}; use the program that wrote it"
            )
        fields["pieces"] = tuple(StoredPiece(**piece) for piece in fields["pieces"])
        fields["shapes"] = {name: tuple(shape) for name, shape in fields["shapes"].items()}
        fields["states"] = tuple(fields["states"])
        return Manifest(**fields)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); the checkpoint is incomplete, choose another with --ckpt-step"
        ) from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); choose another checkpoint with --ckpt-step") from error


def iteration_folder(directory: Path, iteration: int) -> Path:
    """The folder of one iteration, named as Megatron names it."""
    return directory / f"iter_{iteration:07d}"


def find_checkpoint(directory: Path, step: int | None) -> Path | None:
    """The folder to load: that of iteration `step`, else the latest; None where `directory` holds no checkpoint at all.

    Raises CheckpointError where `step` is asked for and missing, or the latest cannot be told.
    """
    if step is not None:
        folder = iteration_folder(directory, step)
        if not folder.is_dir():
            raise CheckpointError(f"--ckpt-step {step}: {folder} does not exist; there is {_existing(directory)}")
        return folder
    latest = directory / LATEST_FILE
    if not latest.exists():
        return None
    text = latest.read_text(encoding="utf-8").strip()
    if not text.isdigit():
        raise CheckpointError(
            f"{latest} holds {text!r} instead of an iteration; name one with --ckpt-step, there is {_existing(directory)}"
        )
    return iteration_folder(directory, int(text))


def _existing(directory: Path) -> str:
    return ", ".join(sorted(folder.name for folder in directory.glob("iter_*") if folder.is_dir())) or "none"
