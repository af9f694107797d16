"""Saving: every rank writes its own pieces into an unfinished folder, rank 0 makes a checkpoint of it when all are done.

What stands on the disk when a run dies, step by step:

    1 rank 0 makes iter_N.tmp-TOKEN                       a leftover, deleted by the next save
    2 every rank writes and fsyncs rank_R.safetensors
    3 every rank writes rank_R.json: its pieces and checksums
    4 rank 0 writes manifest.json, then complete.json
    5 rank 0 renames the folder to iter_N                 a complete checkpoint; `latest` still names the one before
    6 rank 0 moves `latest`                               the checkpoint to load
    7 rank 0 deletes what --keep-last and --save-retain-interval do not keep

In steps 2 to 7 of an asynchronous save no rank waits for another: each writes from a thread of its own, and rank 0's thread looks for the
files of step 3.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_zpp.checkpoint.durable import sync_folder, write_durably
from megatron_zpp.checkpoint.folders import (
    Stage,
    complete_iterations,
    delete_checkpoint,
    expendable,
    iteration_folder,
    leftovers,
    move_latest,
    put_in_place,
    settle,
    staged_folder,
)
from megatron_zpp.checkpoint.manifest import (
    ELEMENT_BYTES,
    ELEMENT_TYPE,
    MANIFEST_FILE,
    MARKER_FILE,
    CheckpointError,
    Manifest,
    StoredFile,
    StoredPiece,
    marker_json,
    parse_file,
    parse_piece,
)
from megatron_zpp.checkpoint.owner import is_abandoned, own_token
from megatron_zpp.checkpoint.shard_file import TensorEntry, lay_out, write_file
from megatron_zpp.checkpoint.shared_folder import LOOK_EVERY_SECONDS, SHARED_FOLDER, VISIBLE_WITHIN_SECONDS, is_seen
from megatron_zpp.checkpoint.snapshot import HostSnapshot
from megatron_zpp.parallel.initialize import gather_texts, joined_errors
from megatron_zpp.zero.pieces import Piece

_SPARE_BYTES = 1 << 20  # of the manifest and other small files
Gather = Callable[[str], list[str]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Share:
    """What one rank contributes to every checkpoint: pieces whose values are views of its living state."""

    rank: int
    world_size: int
    pieces: Sequence[Piece]

    @property
    def file_name(self) -> str:
        return f"rank_{self.rank:05d}.safetensors"

    @property
    def nbytes(self) -> int:
        return sum(piece.values.numel() for piece in self.pieces) * ELEMENT_BYTES


@dataclass(frozen=True)
class SaveOptions:
    """keep_last, retain_interval: see `folders.expendable`. in_background: write from a snapshot while training goes on."""

    in_background: bool = False
    keep_last: int | None = None
    retain_interval: int | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is in place. not_deleted: iterations that should have gone and could not, because somebody reads or guards them."""

    iteration: int
    nbytes: int
    seconds: float
    not_deleted: tuple[int, ...]


@dataclass(frozen=True)
class _Save:
    """A save under way. written: by this rank. finished: by rank 0, who makes a checkpoint of what all have written."""

    manifest: Manifest
    unfinished: Path
    token: str
    started: float = field(default_factory=time.monotonic)
    all_written: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    written: Future[None] = field(default_factory=Future)
    finished: Future[SavedCheckpoint] = field(default_factory=Future)


class CheckpointSaver:
    """Saves checkpoints into `directory`, which all ranks see; at most one save is under way. Every rank must make the same calls.

    gather: each rank's text, in rank order.
    """

    def __init__(self, directory: Path, share: Share, options: SaveOptions, gather: Gather = gather_texts) -> None:
        self.directory = directory
        self._share = share
        self._options = options
        self._gather = gather
        self._save: _Save | None = None
        self._is_reported = True
        self._snapshot = HostSnapshot(share.pieces) if options.in_background else None

    @property
    def iteration_under_way(self) -> int | None:
        """The iteration whose save has not been waited for and is not known to be done."""
        return None if self._save is None or self._is_reported else self._save.manifest.iteration

    def save(self, manifest: Manifest) -> SavedCheckpoint | None:
        """Saves the state as it is now. With in_background it returns None when the state has been copied, else as `finish`.

        manifest: all of it but files and pieces. Raises CheckpointError, alike on every rank, where it cannot be written.
        """
        self.finish()
        final = iteration_folder(self.directory, manifest.iteration)
        token = self._begin(final)
        save = _Save(manifest, staged_folder(final, Stage.UNFINISHED, token), token)
        self._save, self._is_reported = save, False
        if self._snapshot is not None:
            self._snapshot.take()
            threading.Thread(target=self._write_and_finish, args=(save, self._snapshot.pieces), name="checkpoint", daemon=True).start()
            return None
        _settle(save.written, lambda: self._write_share(save, self._share.pieces))
        self._agree_on(save)
        self._finish_save(save)
        return self.finish()

    def check(self) -> SavedCheckpoint | None:
        """What has come to its end since the last call; only rank 0 learns of it before `finish`.

        Raises what a thread of this rank met. To be called after every step; it waits for nobody.
        """
        if self._save is None or self._is_reported:
            return None
        if self._save.written.done():
            self._save.written.result()
        if not self._save.finished.done():
            return None
        self._is_reported = True
        return self._save.finished.result()

    def finish(self) -> SavedCheckpoint | None:
        """Waits for the save under way; on rank 0 what it came to, where `check` has not told already.

        Raises its errors alike on every rank, as CheckpointError.
        """
        if self._save is None:
            return None
        save, was_reported = self._save, self._is_reported
        self._agree_on(save)
        self._agree(_failure_of(save.finished.result) if self._share.rank == 0 else "", save.unfinished)
        self._save, self._is_reported = None, True
        return save.finished.result() if self._share.rank == 0 and not was_reported else None

    def _agree_on(self, save: _Save) -> None:
        """Returns when every rank has written its share."""
        try:
            self._agree(_failure_of(save.written.result), save.unfinished)
        except CheckpointError:
            save.given_up.set()
            raise
        save.all_written.set()

    def _agree(self, mistake: str, unfinished: Path) -> None:
        """Nothing, where no rank met a mistake; otherwise the unfinished folder goes, and CheckpointError is raised on every rank."""
        mistakes = self._gather(mistake)
        if not any(mistakes):
            return
        self._save = None
        if self._share.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(joined_errors(mistakes))

    # ---- before anything is written

    def _begin(self, final: Path) -> str:
        """The token of a new unfinished folder that every rank sees, on a disk with room for all."""
        token, mistake = "", ""
        if self._share.rank == 0:
            token = own_token()
            mistake = _failure_of(lambda: make_unfinished(staged_folder(final, Stage.UNFINISHED, token)))
        answers = [json.loads(text) for text in self._gather(json.dumps([token, mistake, self._share.nbytes]))]
        token, mistake, _ = answers[0]
        if mistake:
            raise CheckpointError(mistake)
        folder = staged_folder(final, Stage.UNFINISHED, token)
        needed_bytes = sum(nbytes for _, _, nbytes in answers) + _SPARE_BYTES
        self._agree(_failure_of(lambda: _check_folder(folder, needed_bytes)), folder)
        return token

    # ---- what may run in a thread

    def _write_and_finish(self, save: _Save, pieces: Sequence[Piece]) -> None:
        _settle(save.written, lambda: self._write_share(save, pieces))
        self._finish_save(save)

    def _write_share(self, save: _Save, pieces: Sequence[Piece]) -> None:
        file, stored = write_pieces(save.unfinished / self._share.file_name, pieces, save.manifest.chunk_bytes)
        record = json.dumps({"file": vars(file), "pieces": [vars(piece) for piece in stored]})
        partial = save.unfinished / f"{_record_name(self._share.rank)}.partial"
        write_durably(partial, record)
        partial.rename(save.unfinished / _record_name(self._share.rank))
        sync_folder(save.unfinished)

    def _finish_save(self, save: _Save) -> None:
        if self._share.rank == 0 and save.written.exception() is None:
            _settle(save.finished, lambda: self._make_checkpoint(save))

    def _make_checkpoint(self, save: _Save) -> SavedCheckpoint:
        records = [self._wait_for_record(save, rank) for rank in range(self._share.world_size)]
        files = tuple(parse_file(record["file"]) for record in records)
        pieces = tuple(parse_piece(piece) for record in records for piece in record["pieces"])
        seal(save.unfinished, replace(save.manifest, files=files, pieces=pieces))
        iteration = save.manifest.iteration
        put_in_place(save.unfinished, iteration_folder(self.directory, iteration), save.token)
        move_latest(self.directory, str(iteration))
        not_deleted = self._delete_expendable(save)
        return SavedCheckpoint(iteration, sum(file.nbytes for file in files), time.monotonic() - save.started, not_deleted)

    def _wait_for_record(self, save: _Save, rank: int) -> dict[str, Any]:
        path = save.unfinished / _record_name(rank)
        deadline = None
        while True:
            try:
                record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return record
            except FileNotFoundError:
                pass
            if save.given_up.is_set():
                raise RuntimeError("the save was given up")
            if save.all_written.is_set():
                deadline = deadline or time.monotonic() + VISIBLE_WITHIN_SECONDS
                if time.monotonic() > deadline:
                    raise CheckpointError(f"rank 0 does not see {path}, which rank {rank} has written; {SHARED_FOLDER}")
            time.sleep(LOOK_EVERY_SECONDS)

    def _delete_expendable(self, save: _Save) -> tuple[int, ...]:
        options = self._options
        if options.keep_last is None and options.retain_interval is None:
            return ()
        complete = complete_iterations(self.directory)
        unwanted = expendable(complete, save.manifest.iteration, options.keep_last, options.retain_interval)
        folders = {iteration: iteration_folder(self.directory, iteration) for iteration in unwanted}
        return tuple(iteration for iteration, folder in folders.items() if not delete_checkpoint(folder, save.token))


def write_pieces(path: Path, pieces: Sequence[Piece], chunk_bytes: int) -> tuple[StoredFile, list[StoredPiece]]:
    """A file that holds the pieces, as the manifest lists it: tensors of one dimension named `<parameter>.<state>.<start>`."""
    names = [f"{piece.parameter}.{piece.state}.{piece.start}" for piece in pieces]
    layout = lay_out(
        [TensorEntry(name, ELEMENT_TYPE, (piece.stop - piece.start,)) for name, piece in zip(names, pieces, strict=True)],
    )
    file = write_file(path, layout, (piece.values for piece in pieces), chunk_bytes)
    offsets: dict[tuple[str, int, int], dict[str, int]] = {}
    for piece, offset in zip(pieces, layout.offsets, strict=True):
        offsets.setdefault((piece.parameter, piece.start, piece.stop), {})[piece.state] = offset
    return file, [StoredPiece(*place, path.name, by_state) for place, by_state in offsets.items()]


def seal(unfinished: Path, manifest: Manifest) -> None:
    """Writes manifest and marker into a folder that has all files of the manifest, and takes out what only served the writing."""
    for stored in manifest.files:
        nbytes = (unfinished / stored.name).stat().st_size
        if nbytes != stored.nbytes:
            raise CheckpointError(f"{unfinished / stored.name} has {nbytes} bytes where {stored.nbytes} were written; {SHARED_FOLDER}")
    text = manifest.to_json()
    write_durably(unfinished / MANIFEST_FILE, text)
    write_durably(unfinished / MARKER_FILE, marker_json(text))
    kept = {MANIFEST_FILE, MARKER_FILE, *(stored.name for stored in manifest.files)}
    for path in unfinished.iterdir():
        if path.name not in kept:
            path.unlink()
    sync_folder(unfinished)


def make_unfinished(folder: Path) -> None:
    """Makes the folder of a new save, after what dead runs left beside it is gone."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in leftovers(folder.parent):
        if leftover.stage is not Stage.UNFINISHED or is_abandoned(leftover.folder, leftover.token):
            settle(leftover)
    shutil.rmtree(folder, ignore_errors=True)  # of a save of this process that failed
    folder.mkdir()
    sync_folder(folder.parent)


def _check_folder(folder: Path, needed_bytes: int) -> None:
    """Nothing, where this rank sees the folder and its disk has room for the whole checkpoint."""
    if not is_seen(folder):
        raise CheckpointError(f"rank 0 has made {folder}, which is not there on this rank's machine; {SHARED_FOLDER}")
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"the checkpoint takes {in_gib(needed_bytes)} and {folder.parent} has {in_gib(free_bytes)} left; "
            "free some, keep fewer checkpoints with --keep-last, or choose another --save"
        )


def in_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f} GiB"


def _record_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def _settle(future: Future[Result], task: Callable[[], Result]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)


def _failure_of(task: Callable[[], object]) -> str:
    """What went wrong in words, or an empty string."""
    try:
        task()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
