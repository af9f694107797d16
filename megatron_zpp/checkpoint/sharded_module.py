"""Saves and loads any sharded module, for programs other than the training script: the same checkpoints, without flags and data.

    engine = shard(model, units)
    restored = load(engine, "checkpoints", missing_ok=True)  # None if this run is the first
    for step in range(restored.step if restored else 0, steps):
        ...
        save(engine, "checkpoints", step + 1)

A checkpoint holds weights, Adam's moments, the loss scale, the buffers of rank 0 that a state dict would have, and what the program adds.
docs/checkpoints.md describes the files and what a crash leaves of them.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_in
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from megatron_zpp.checkpoint.contents import first_difference
from megatron_zpp.checkpoint.engine_state import load_engine, manifest_of, share_of
from megatron_zpp.checkpoint.folders import find_checkpoint
from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, CheckpointError, DamagedCheckpointError
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.run_lock import Job, RunLock, take_lock
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.checkpoint.shard_file import ELEMENT_TYPES
from megatron_zpp.config.flag import LARGEST_COUNT
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.alike import check_alike, raising_alike, texts_of_ranks
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.pieces import parameters

_log = logging.getLogger(__name__)
_OF_MODULE = "module"  # the member of Manifest.run that only checkpoints of `save` have


@dataclass(frozen=True)
class Restored:
    """What `load` has found. step, extra: as they were given to `save`."""

    step: int
    extra: Mapping[str, Any]


def save(
    engine: ZeroEngine,
    folder: str | PathLike[str],
    step: int | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
) -> None:
    """Saves the state of an engine and its module as `folder`/iter_STEP, between two steps. Every rank calls it, with the same arguments.

    folder: seen by all ranks; it is made if it is missing. A crash at any moment leaves the checkpoints that were complete before.
    step: names the checkpoint, 0 or more; by default the number of steps that the engine has done. One of the same step is replaced.
    extra: what the program needs besides, such as the position in its data, as JSON: that of rank 0 is saved.
    keep_last: how many of the latest checkpoints stay, 1 or more; by default all.
    Raises UserError (CheckpointError if files are the reason) on every rank, and nothing is lost: the engine can go on.
    """
    backend, device = engine.links.backend, engine.device
    engine.finish_differences()
    with raising_alike(backend, device):
        number = engine.iteration if step is None else _checked_step(step)
        if keep_last is not None and not 1 <= keep_last <= LARGEST_COUNT:
            raise UserError(f"keep_last is {keep_last}; give 1 or more, or leave it out to keep all checkpoints")
        added = _as_json(extra or {})
    check_alike(backend, device, repr((number, keep_last)).encode(), "arguments of save()")
    manifest = manifest_of(engine, Progress(iteration=number), {}, with_moments=True)
    own = {"steps": engine.iteration, "weight_code": _weight_code(engine), "buffers": _buffers_as_text(engine.module), "extra": added}
    manifest = replace(manifest, run={**manifest.run, _OF_MODULE: own})
    saver = CheckpointSaver(
        Path(folder), share_of(engine, with_moments=True), SaveOptions(keep_last=keep_last), partial(texts_of_ranks, backend, device)
    )
    lock = None
    with raising_alike(backend, device):
        if engine.rank == 0:
            lock = _locked(Path(folder))
    try:
        saved = saver.save(manifest)
        if saved is not None:  # on rank 0
            _log.info("saved step %d in %s: %.3f GiB in %.3f s", number, folder, saved.nbytes / 2**30, saved.seconds)
            for kept in saved.not_deleted:
                _log.warning("could not delete the checkpoint of step %d in %s: it is being read, or the file system refuses", kept, folder)
    finally:
        if lock is not None:
            lock.release()


@overload
def load(
    engine: ZeroEngine,
    folder: str | PathLike[str],
    step: int | None = None,
    *,
    with_optimizer: bool = True,
    missing_ok: Literal[False] = False,
) -> Restored: ...


@overload
def load(
    engine: ZeroEngine, folder: str | PathLike[str], step: int | None = None, *, with_optimizer: bool = True, missing_ok: bool
) -> Restored | None: ...


def load(
    engine: ZeroEngine, folder: str | PathLike[str], step: int | None = None, *, with_optimizer: bool = True, missing_ok: bool = False
) -> Restored | None:
    """Loads a checkpoint of `save` into an engine and its module. Every rank calls it, with the same arguments.

    The module must have the parameters that were saved. Numbers of ranks and nodes, policy and units may be others. With the same ones, the
    next steps have the bits that they would have had without the interruption.
    step: which checkpoint; by default the latest.
    with_optimizer: whether Adam's moments, the loss scale and the number of steps are loaded as well.
    missing_ok: whether a folder without any checkpoint is right; then the answer is None.
    Raises UserError (CheckpointError if files are the reason) on every rank. After an error in the values of a file the weights are
    those of no step.
    """
    backend, device = engine.links.backend, engine.device
    reader = None
    with raising_alike(backend, device), _naming_arguments():
        found = find_checkpoint(Path(folder), None if step is None else _checked_step(step), choice="step")
        if found is not None:
            reader = CheckpointReader(found)
    identity = "" if reader is None else reader.identity
    check_alike(backend, device, repr((identity, with_optimizer)).encode(), f"arguments of load() or checkpoints in {folder}")
    if reader is None:
        if missing_ok:
            return None
        raise CheckpointError(f"{folder} holds no checkpoint; name the folder that was given to save(), or pass missing_ok=True")
    with reader:
        with raising_alike(backend, device):
            own = _own_members(reader)
            buffers = _buffers_in(own)
            _check_module(engine, reader, buffers, with_optimizer=with_optimizer)
        if with_optimizer:
            engine.start_iteration(own.count("steps"))  # before copies are filled: it may end full precision, and then they start anew
        has_copies = with_optimizer and own.values.get("weight_code") == _weight_code(engine) and engine.keeps_copies
        with raising_alike(backend, device), _naming_arguments():
            load_engine(engine, reader, with_moments=with_optimizer, with_copies=has_copies)
    with torch.no_grad():
        for path, buffer in _persistent_buffers(engine.module):
            if path in buffers:
                buffer.copy_(buffers[path])
    if engine.rank == 0:
        _log.info("loaded step %d from %s", reader.manifest.iteration, reader.folder)
    return Restored(reader.manifest.iteration, own.members("extra").values)


def _checked_step(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= LARGEST_COUNT:
        raise UserError(f"step is {step!r}; give a whole number, 0 or more")
    return step


def _as_json(extra: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(extra), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"extra cannot be saved as JSON ({error}); give numbers, texts, lists and dictionaries with texts as keys"
        ) from error


def _locked(folder: Path) -> RunLock:
    """The lock of a folder, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made ({error.strerror}); give another folder") from error
    return take_lock(folder, Job(flag="folder"), _log.warning)


def _weight_code(engine: ZeroEngine) -> str:
    """What the copies that the engine keeps across steps depend on; empty if it keeps none."""
    return f"{ELEMENT_TYPES[engine.options.dtype]} {engine.options.policy.weight_codes.inter}" if engine.keeps_copies else ""


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Damage is answered by an argument of `load`, and not by the flags that the error names."""
    try:
        yield
    except DamagedCheckpointError as error:
        raise CheckpointError(f"{error.finding}; load an older one with step=") from error


def _own_members(reader: CheckpointReader) -> Members:
    """What `save` has added to the state of a run. One of the training script has nothing there."""
    path = reader.folder / MANIFEST_FILE
    run = Members(reader.manifest.run, OutsideFile(path, str(path), "load an older one with step=", CheckpointError), "run")
    nothing = {"steps": reader.manifest.iteration, "weight_code": "", "buffers": "", "extra": {}}
    return run.filled({_OF_MODULE: nothing}).members(_OF_MODULE)


def _check_module(engine: ZeroEngine, reader: CheckpointReader, buffers: Mapping[str, Tensor], *, with_optimizer: bool) -> None:
    """Raises CheckpointError if the checkpoint is that of another module, or has no optimizer state of what is trained here."""
    folder, manifest = reader.folder, reader.manifest
    expected = {placed.spec.name: placed.spec.whole_shape for placed in parameters(engine)}
    if dict(manifest.shapes) != expected:
        raise CheckpointError(f"{folder} holds another module: {first_difference(manifest.shapes, expected)}; load it into that one")
    if _OF_MODULE in manifest.run:
        shapes = {path: tuple(buffer.shape) for path, buffer in buffers.items()}
        wanted = {path: tuple(buffer.shape) for path, buffer in _persistent_buffers(engine.module)}
        if shapes != wanted:
            raise CheckpointError(f"{folder} holds another module: buffer {first_difference(shapes, wanted)}; load it into that one")
    if not with_optimizer:
        return
    if len(manifest.states) < 2:
        raise CheckpointError(f"{folder} holds no optimizer state; pass with_optimizer=False to begin without it")
    trained = (placed.spec.name for unit in engine.trained for placed in unit.layout.params)
    missing = next((path for path in trained if path in manifest.frozen), None)
    if missing is not None:
        raise CheckpointError(
            f"{folder} has no optimizer state of {missing}, which was frozen there; freeze it before shard(), or pass "
            "with_optimizer=False to begin all of it anew"
        )


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict of the module would have."""
    for path, inner in module.named_modules():
        for name, buffer in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _buffers_as_text(module: nn.Module) -> str:
    """They are few and small, and belong to no rank, so they stand in the manifest: a safetensors file in base64."""
    buffers = {path: buffer.detach().cpu().contiguous().clone() for path, buffer in _persistent_buffers(module)}
    return base64.b64encode(bytes_of(buffers)).decode() if buffers else ""


def _buffers_in(own: Members) -> dict[str, Tensor]:
    text = own.text("buffers")
    try:
        return tensors_in(base64.b64decode(text, validate=True)) if text else {}
    except (ValueError, SafetensorError):
        own.refuse("buffers", "a safetensors file in base64")
