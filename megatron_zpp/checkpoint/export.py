"""Writes weights as safetensors files for other programs. Only one tensor, or a part of one, is in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.durable import rename_durably, write_durably
from megatron_zpp.checkpoint.manifest import CHUNK_BYTES
from megatron_zpp.checkpoint.shard_file import DTYPES, TensorEntry, lay_out, write_file
from megatron_zpp.system.output_file import sync_folder
from megatron_zpp.system.owner import own_token
from megatron_zpp.system.user_error import UserError

METADATA = {"format": "pt"}  # required by transformers
PART_NUMEL = 1 << 21  # cast and written at a time


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill. It gets its name when the block ends without an error. Raises UserError if the name is taken."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; choose another name or remove it.")
    folder = Path(os.path.abspath(folder))  # `.` has no name
    unfinished = folder.with_name(f"{folder.name}.tmp-{own_token()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if folder.exists():
            folder.rmdir()
        sync_folder(unfinished)
        rename_durably(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_tensors(folder: Path, entries: Sequence[TensorEntry], values_of: Callable[[TensorEntry], Tensor], most_bytes: int) -> list[str]:
    """Writes the tensors as `write_parts` does, and returns the names of the files. values_of: returns a tensor of the entry's shape."""
    return write_parts(folder, entries, lambda entry: values_of(entry).reshape(-1).split(PART_NUMEL), most_bytes)


def write_parts(
    folder: Path, entries: Sequence[TensorEntry], parts_of: Callable[[TensorEntry], Iterable[Tensor]], most_bytes: int
) -> list[str]:
    """Writes the tensors and returns the names of the files: model.safetensors, or several shards with an index.

    most_bytes: limit of each shard; only a shard of a single tensor may exceed it.
    parts_of: yields the elements of an entry's tensor in row-major order, part by part, in any dtype. They are cast to the entry's dtype.
    """
    shards = _shards(entries, most_bytes)
    names = [_shard_name(index, len(shards)) for index in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        parts = (part.to(DTYPES[entry.element_type]) for entry in shard for part in parts_of(entry))
        write_file(folder / name, lay_out(shard, METADATA), parts, CHUNK_BYTES)
    if len(shards) > 1:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total_bytes = sum(entry.nbytes for entry in entries)
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": places})
    return names


def write_json(path: Path, members: dict[str, Any]) -> None:
    path.unlink(missing_ok=True)
    write_durably(path, json.dumps(members, indent=2) + "\n")


def _shards(entries: Sequence[TensorEntry], most_bytes: int) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    filled_bytes = 0
    for entry in entries:
        if shards[-1] and filled_bytes + entry.nbytes > most_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(entry)
        filled_bytes += entry.nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
