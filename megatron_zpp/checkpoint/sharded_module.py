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

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, Literal, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_in
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from megatron_zpp.checkpoint.contents import check_moments, first_difference
from megatron_zpp.checkpoint.folders import find_checkpoint
from megatron_zpp.checkpoint.island_state import state_of
from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, CheckpointError, DamagedCheckpointError
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.run_lock import Job, take_lock
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.checkpoint.shard_file import ELEMENT_TYPES
from megatron_zpp.comm.backend import WorldGather
from megatron_zpp.config.flag import LARGEST_COUNT
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.alike import check_alike, raising_alike, texts_of_ranks
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.pieces import parameters

_log = logging.getLogger(__name__)
_OF_MODULE = "module"  # the member of Manifest.run that only checkpoints of `save` have
_BUFFERS = "buffers.safetensors"
_MOST_LEVELS = 32  # of lists and dictionaries in `extra`; readers take 64 in the whole manifest


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
    with_frozen: bool = True,
    outer: OuterSteps | None = None,
) -> None:
    """Saves the state of an engine and its module as `folder`/iter_STEP, between two steps. Every rank calls it, with the same arguments.

    folder: seen by all ranks; it is made if it is missing. A crash at any moment leaves the checkpoints that were complete before. Give
        each run a folder of its own: only during a save is it locked.
    step: names the checkpoint, 0 or more; by default the number of steps that the engine has done. One of the same step is replaced.
    extra: what the program needs besides, such as the position in its data, as JSON: that of rank 0 is saved.
    keep_last: how many of the latest checkpoints stay, 1 or more; by default all.
    with_frozen: whether frozen parameters are saved as well. A checkpoint without them is loaded where they have their values already.
    outer: the outer steps of islands, which save as one: what they share, and the inner weights and moments of each.
    Raises UserError (CheckpointError if files are the reason) on every rank, and nothing is lost: the engine can go on. Raises RuntimeError
    between a step of the engine and that of `outer`.
    """
    ranks, device = _ranks(engine, outer), engine.device
    engine.check_open()
    engine.finish_differences()
    with raising_alike(ranks, device):
        number = engine.iteration if step is None else _checked_count("step", step, 0)
        kept = None if keep_last is None else _checked_count("keep_last", keep_last, 1)
        added = _checked_json(extra or {})
        buffers = _bytes_of_buffers(engine.module) if ranks.rank == 0 else b""
    check_alike(ranks, device, repr((number, kept, with_frozen)).encode(), "arguments of save()", remedy="")
    progress = Progress(iteration=number)
    state = state_of(engine, outer)
    manifest, share = state.manifest(progress, {}, with_moments=True), state.share(with_moments=True)
    own = {"steps": engine.iteration, "weight_code": _weight_code(engine), "with_frozen": with_frozen, "extra": added}
    run = {**manifest.run, _OF_MODULE: own}
    if not with_frozen:
        left_out = manifest.frozen
        run.pop("frozen", None)
        manifest = replace(manifest, shapes={path: shape for path, shape in manifest.shapes.items() if path not in left_out})
        share = replace(share, pieces=[piece for piece in share.pieces if piece.parameter not in left_out])
    share = replace(share, others={_BUFFERS: buffers} if buffers else {})
    with _locked(ranks, device, Path(folder)) as check_lock:
        saver = CheckpointSaver(Path(folder), share, SaveOptions(keep_last=kept), partial(texts_of_ranks, ranks, device), check_lock)
        saved = saver.save(replace(manifest, run=run))
    if saved is not None:  # on rank 0
        _log.info("saved step %d in %s: %.3f GiB in %.3f s", number, folder, saved.nbytes / 2**30, saved.seconds)
        for old in saved.not_deleted:
            _log.warning("could not delete the checkpoint of step %d in %s: it is being read, or the file system refuses", old, folder)


def _ranks(engine: ZeroEngine, outer: OuterSteps | None) -> WorldGather:
    """The ranks that save or load together."""
    if outer is None:
        if engine.is_joined:
            raise UserError("the engine is joined with those of other islands, and all of them save and load as one; pass outer=")
        return engine.links.backend
    if outer.engine is not engine:
        raise UserError("outer belongs to another engine; pass the engine that join_islands() was given")
    outer.check_open()
    return outer.everyone


@overload
def load(
    engine: ZeroEngine,
    folder: str | PathLike[str],
    step: int | None = None,
    *,
    with_optimizer: bool = True,
    missing_ok: Literal[False] = False,
    outer: OuterSteps | None = None,
) -> Restored: ...


@overload
def load(
    engine: ZeroEngine,
    folder: str | PathLike[str],
    step: int | None = None,
    *,
    with_optimizer: bool = True,
    missing_ok: bool,
    outer: OuterSteps | None = None,
) -> Restored | None: ...


def load(
    engine: ZeroEngine,
    folder: str | PathLike[str],
    step: int | None = None,
    *,
    with_optimizer: bool = True,
    missing_ok: bool = False,
    outer: OuterSteps | None = None,
) -> Restored | None:
    """Loads a checkpoint of `save` into an engine and its module. Every rank calls it, with the same arguments.

    The module must have the parameters that were saved. Numbers of ranks and nodes, policy and units may be others. With the same ones, the
    next steps have the bits that they would have had without the interruption.
    step: which checkpoint; by default the latest.
    with_optimizer: whether Adam's moments, the loss scale and the number of steps are loaded as well.
    missing_ok: whether a folder without any checkpoint is right; then the answer is None.
    outer: the outer steps of islands, which load as one. An island goes on as the one of its number in a checkpoint of as many islands.
        From another number of islands each takes the mean of their inner weights and moments, and so does an engine without `outer`. From a
        checkpoint of no islands each takes its weights and moments, and starts without outer momentum.
    Raises UserError (CheckpointError if files are the reason) on every rank. After an error in the values of a file the weights are those
    of no step, and nothing else has changed: load another checkpoint. Raises RuntimeError within a step.
    """
    ranks, device, state = _ranks(engine, outer), engine.device, state_of(engine, outer)
    engine.check_between_steps()  # gradients of other weights would go into the next update
    with raising_alike(ranks, device):
        wanted = None if step is None else _checked_count("step", step, 0)
    with ExitStack() as stack:
        with _reading(ranks, device):
            found = find_checkpoint(Path(folder), wanted, choice="step")
            reader = None if found is None else stack.enter_context(CheckpointReader(found))
        seen = repr((reader and reader.identity, with_optimizer, missing_ok))
        check_alike(ranks, device, seen.encode(), f"arguments of load() or checkpoints in {folder}", remedy="")
        if reader is None:
            if missing_ok:
                return None
            raise CheckpointError(f"{folder} holds no checkpoint; name the folder that was given to save(), or pass missing_ok=True")
        with _reading(ranks, device):
            stored = _Stored.of(reader)
            stored.check(engine, with_optimizer=with_optimizer)
        has_copies = with_optimizer and engine.keeps_copies and stored.weight_code == _weight_code(engine)
        engine.finish_differences()  # what is under way would be added to copies that have been filled
        with _reading(ranks, device):
            state.fill(reader, with_moments=with_optimizer, with_copies=has_copies)
    if with_optimizer:
        engine.start_iteration(stored.steps)
    state.resume(reader, with_moments=with_optimizer, with_copies=has_copies)
    with torch.no_grad():
        for path, buffer in _persistent_buffers(engine.module):
            if path in stored.buffers:
                buffer.copy_(stored.buffers[path])
    if ranks.rank == 0:
        _log.info("loaded step %d from %s", reader.manifest.iteration, reader.folder)
    return Restored(reader.manifest.iteration, stored.extra)


@dataclass(frozen=True)
class _Stored:
    """What a checkpoint of `save` has besides the state of the parameters. One of the training script has nothing of it."""

    reader: CheckpointReader
    steps: int
    weight_code: str
    extra: Mapping[str, Any]
    buffers: Mapping[str, Tensor]
    has_frozen: bool
    is_of_save: bool

    @classmethod
    def of(cls, reader: CheckpointReader) -> _Stored:
        """Raises CheckpointError for what cannot be used, before anything is loaded."""
        path, run = reader.folder / MANIFEST_FILE, reader.manifest.run
        file = OutsideFile(path, str(path), "load an older one with step=", CheckpointError)
        of_script = {"steps": reader.manifest.iteration, "weight_code": "", "with_frozen": True, "extra": {}}
        own = Members(run, file, "run").filled({_OF_MODULE: of_script}).members(_OF_MODULE)
        if own.count("steps") > LARGEST_COUNT:
            own.refuse("steps", f"at most {LARGEST_COUNT}")
        data = reader.content(_BUFFERS)
        try:
            buffers = tensors_in(data) if data else {}
        except (ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{reader.folder / _BUFFERS} cannot be read ({error}); load an older one with step=") from error
        extra, has_frozen = own.members("extra").values, own.switch("with_frozen")
        return cls(reader, own.count("steps"), own.text("weight_code"), extra, buffers, has_frozen, _OF_MODULE in run)

    def check(self, engine: ZeroEngine, *, with_optimizer: bool) -> None:
        """Raises CheckpointError if it is that of another module, or has no optimizer state of what is trained here."""
        folder, manifest = self.reader.folder, self.reader.manifest
        expected = {placed.spec.name: placed.spec.whole_shape for placed in parameters(engine)}
        trained = {placed.spec.name for unit in engine.trained for placed in unit.layout.params}
        wanted = {path: shape for path, shape in expected.items() if self.has_frozen or path in manifest.shapes or path in trained}
        if dict(manifest.shapes) != wanted:
            raise CheckpointError(f"{folder} holds another module: {first_difference(manifest.shapes, wanted)}; load it into that one")
        if self.is_of_save:
            self._check_buffers(engine.module)
        if not with_optimizer:
            return
        check_moments(folder, manifest, "pass with_optimizer=False to begin without it")
        if missing := sorted(trained & manifest.frozen):
            raise CheckpointError(
                f"{folder} has no optimizer state of {missing[0]}, which was frozen there; freeze it before shard(), or pass "
                "with_optimizer=False to begin all of it anew"
            )

    def _check_buffers(self, module: nn.Module) -> None:
        there, here = (
            {path: f"{list(buffer.shape)} {buffer.dtype}" for path, buffer in buffers}
            for buffers in (self.buffers.items(), _persistent_buffers(module))
        )
        for path in sorted({*there, *here}):
            found, wanted = (buffers.get(path, "missing") for buffers in (there, here))
            if found != wanted:
                raise CheckpointError(
                    f"{self.reader.folder} holds another module: buffer {path} is {found} there and {wanted} here; load it into that one"
                )


def _checked_count(name: str, value: int, smallest: int) -> int:
    try:
        count = index(value)
    except TypeError:
        count = -1
    if isinstance(value, bool) or not smallest <= count <= LARGEST_COUNT:
        raise UserError(f"{name} is {value!r}; give a whole number, {smallest} or more")
    return count


def _checked_json(extra: Mapping[str, Any]) -> Any:
    """`extra`, which comes back from JSON as it is."""
    rule = f"give numbers, texts, lists and dictionaries with texts as keys, at most {_MOST_LEVELS} levels deep"
    try:
        comes_back = _levels(extra) <= _MOST_LEVELS and json.loads(json.dumps(extra, allow_nan=False)) == extra
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"extra cannot be saved as JSON ({error}); {rule}") from error
    if not comes_back:
        raise UserError(f"extra would not come back as it is; {rule}")
    return extra


def _levels(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_levels, inner), default=0)


@contextmanager
def _locked(ranks: WorldGather, device: torch.device, folder: Path) -> Iterator[Callable[[], None]]:
    """Keeps other runs from saving into the folder, which is made if it is missing. Gives what raises an error if the lock was lost."""
    with ExitStack() as stack:
        check: Callable[[], None] = lambda: None  # noqa: E731  of all ranks but the first
        with raising_alike(ranks, device, CheckpointError):
            if ranks.rank == 0:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise CheckpointError(f"{folder} cannot be made ({error.strerror}); give another folder") from error
                lock = take_lock(folder, Job(flag="folder"), _log.warning)
                stack.callback(lock.release)
                check = lock.check
        yield check


@contextmanager
def _reading(ranks: WorldGather, device: torch.device) -> Iterator[None]:
    """Ends the block with a CheckpointError on every rank if it raises one on any. Damage is answered by an argument, not by a flag."""
    with raising_alike(ranks, device, CheckpointError):
        try:
            yield
        except DamagedCheckpointError as error:
            raise CheckpointError(f"{error.finding}; load an older one with step=") from error


def _weight_code(engine: ZeroEngine) -> str:
    """What the copies that the engine keeps across steps depend on; empty if it keeps none."""
    return f"{ELEMENT_TYPES[engine.options.dtype]} {engine.options.policy.weight_codes.inter}" if engine.keeps_copies else ""


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict of the module would have."""
    for path, inner in module.named_modules():
        for name, buffer in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _bytes_of_buffers(module: nn.Module) -> bytes:
    """A safetensors file of the buffers; nothing without any. Raises UserError for one that such a file cannot hold."""
    buffers = {}
    for path, buffer in _persistent_buffers(module):
        try:
            value = buffer.detach().cpu().contiguous().clone()
            tensors_in(bytes_of({path: value}))
        except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"buffer {path} ({buffer.dtype}, {buffer.layout}) cannot be saved; register it with persistent=False, and keep it yourself"
            ) from error
        buffers[path] = value
    return bytes_of(buffers) if buffers else b""
