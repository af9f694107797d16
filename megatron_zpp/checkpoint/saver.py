"""Saves checkpoints: every rank writes its own pieces into an unfinished folder, and then rank 0 turns it into a checkpoint.

The steps of a save, and what is on the disk after each:

    1 rank 0 makes iter_N.tmp-TOKEN                       a leftover, deleted by the next save
    2 every rank writes and fsyncs rank_R.safetensors
    3 every rank writes rank_R.json: its pieces and checksums
    4 rank 0 writes manifest.json, then complete.json
    5 rank 0 renames the folder to iter_N                 a complete checkpoint; `latest` still names the one before
    6 rank 0 moves `latest`                               the checkpoint to load
    7 rank 0 deletes what --keep-last and --save-retain-interval do not keep

In steps 2 to 7 of an asynchronous save no rank waits in a collective. Each rank writes in a background thread, and the thread of rank 0
polls for the files of step 3.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from megatron_zpp.checkpoint.durable import LOOK_EVERY_SECONDS, SHARED_FOLDER, VISIBLE_WITHIN_SECONDS
from megatron_zpp.checkpoint.folders import (
    Stage,
    complete_iterations,
    delete_checkpoint,
    iteration_folder,
    iterations_to_delete,
    move_latest,
    put_in_place,
    staged_folder,
)
from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES, ELEMENT_TYPE, CheckpointError, Manifest, StoredFile, StoredPiece
from megatron_zpp.checkpoint.shard_file import write_bytes
from megatron_zpp.checkpoint.snapshot import HostSnapshot
from megatron_zpp.checkpoint.unfinished import SPARE_BYTES, check_room, make_unfinished, read_record, seal, write_pieces, write_record
from megatron_zpp.parallel.initialize import gather_texts, joined_errors
from megatron_zpp.system.owner import own_token
from megatron_zpp.zero.pieces import Piece
from megatron_zpp.zero.policy import WEIGHT

Gather = Callable[[str], list[str]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Share:
    """What one rank writes into every checkpoint: pieces whose values are views of its current state.

    others: of rank 0, whole safetensors files by name.
    """

    rank: int
    world_size: int
    pieces: Sequence[Piece]
    others: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return f"rank_{self.rank:05d}.safetensors"

    @property
    def nbytes(self) -> int:
        """Bytes in the file, where frozen weights are as wide as others."""
        widths = {WEIGHT: ELEMENT_BYTES[ELEMENT_TYPE]}
        of_pieces = sum(piece.values.numel() * widths.get(piece.state, piece.values.itemsize) for piece in self.pieces)
        return of_pieces + sum(map(len, self.others.values()))


@dataclass(frozen=True)
class SaveOptions:
    """How to save. in_background: write from a snapshot while training continues.

    keep_last: how many of the latest checkpoints stay after a save; one, if only retain_interval is given.
    retain_interval: those of its multiples stay as well. The others up to the saved one are deleted; none is if both are None.
    """

    in_background: bool = False
    keep_last: int | None = None
    retain_interval: int | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint. not_deleted: iterations that could not be deleted, because they are being read or the file system refuses."""

    iteration: int
    nbytes: int
    seconds: float
    not_deleted: tuple[int, ...]


@dataclass(frozen=True)
class _Save:
    """A save in progress. others: of Share, once they are on disk.

    copied: this rank's state is in the snapshot. written: this rank's files are on disk. finished: rank 0 has completed the checkpoint.
    """

    manifest: Manifest
    unfinished: Path
    token: str
    others: list[StoredFile] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    all_written: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    copied: Future[None] = field(default_factory=Future)
    written: Future[None] = field(default_factory=Future)
    finished: Future[SavedCheckpoint] = field(default_factory=Future)


class CheckpointSaver:
    """Saves checkpoints into `directory`, which all ranks share. Every rank must make the same calls. One save runs at a time.

    gather: returns the text of every rank, in rank order. check_lock: raises CheckpointError if this run may not save there any more;
    rank 0 calls it before anything is written and before the checkpoint gets its name.
    """

    def __init__(
        self,
        directory: Path,
        share: Share,
        options: SaveOptions,
        gather: Gather = gather_texts,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._share = share
        self._options = options
        self._gather = gather
        self._check_lock = check_lock
        self._save: _Save | None = None
        self._is_reported = True
        self._snapshot = HostSnapshot(share.pieces) if options.in_background else None

    @property
    def iteration_under_way(self) -> int | None:
        """The iteration of a save that is not yet known to be finished; None if there is no such save."""
        return None if self._save is None or self._is_reported else self._save.manifest.iteration

    def save(self, manifest: Manifest) -> SavedCheckpoint | None:
        """Saves the current state. With in_background it returns None, and the state must not change before `wait_for_copy` returns.

        Otherwise it returns the same as `finish`.
        manifest: complete except for files and pieces. Raises CheckpointError, on every rank alike, if it cannot be written.
        """
        self.finish()
        final = iteration_folder(self.directory, manifest.iteration)
        token = self._create_folder(final)
        save = _Save(manifest, staged_folder(final, Stage.UNFINISHED, token), token)
        self._save, self._is_reported = save, False
        if self._snapshot is not None:
            self._snapshot.begin()
            threading.Thread(target=self._save_in_background, args=(save, self._snapshot), name="checkpoint", daemon=True).start()
            return None
        _resolve(save.written, lambda: self._write_share(save, self._share.pieces))
        self._wait_until_all_wrote(save)
        self._finish_save(save)
        return self.finish()

    def wait_for_copy(self) -> None:
        """Waits until a background save has copied the state. Before that the state must not change."""
        if self._snapshot is not None and self._save is not None:
            self._save.copied.result()

    def check(self) -> SavedCheckpoint | None:
        """The checkpoint finished since the last call, or None. Only rank 0 gets one; the other ranks learn of it in `finish`.

        Call it after every step; it does not wait. Raises the errors of this rank's background thread.
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
        """Waits for the save in progress. Returns its checkpoint on rank 0, unless `check` has returned it already; else None.

        Raises its errors on every rank alike, as CheckpointError.
        """
        if self._save is None:
            return None
        save, was_reported = self._save, self._is_reported
        self._wait_until_all_wrote(save)
        self._raise_if_any_failed(_error_text(save.finished.result) if self._share.rank == 0 else "", save.unfinished)
        self._save, self._is_reported = None, True
        return save.finished.result() if self._share.rank == 0 and not was_reported else None

    def _wait_until_all_wrote(self, save: _Save) -> None:
        """Returns when every rank has written its share."""
        try:
            self._raise_if_any_failed(_error_text(save.written.result), save.unfinished)
        except CheckpointError:
            save.given_up.set()
            raise
        save.all_written.set()

    def _raise_if_any_failed(self, error: str, unfinished: Path) -> None:
        """Raises CheckpointError on every rank, and deletes the unfinished folder, if any rank has an error."""
        errors = self._gather(error)
        if not any(errors):
            return
        self._save = None
        if self._share.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(joined_errors(errors))

    # ---- before anything is written

    def _create_folder(self, final: Path) -> str:
        """Creates the unfinished folder and returns its token. Checks that every rank sees the folder and that the disk has room."""
        token, error = "", ""
        if self._share.rank == 0:
            token = own_token()
            error = _error_text(self._check_lock) or _error_text(lambda: make_unfinished(staged_folder(final, Stage.UNFINISHED, token)))
        answers = [json.loads(text) for text in self._gather(json.dumps([token, error, self._share.nbytes]))]
        token, error, _ = answers[0]
        if error:
            raise CheckpointError(error)
        folder = staged_folder(final, Stage.UNFINISHED, token)
        needed_bytes = sum(nbytes for _, _, nbytes in answers) + SPARE_BYTES
        self._raise_if_any_failed(_error_text(lambda: check_room(folder, needed_bytes)), folder)
        return token

    # ---- may run in the background thread

    def _save_in_background(self, save: _Save, snapshot: HostSnapshot) -> None:
        _resolve(save.copied, snapshot.copy)
        _resolve(save.written, lambda: self._write_copy(save, snapshot))
        self._finish_save(save)

    def _write_copy(self, save: _Save, snapshot: HostSnapshot) -> None:
        save.copied.result()
        self._write_share(save, snapshot.pieces)

    def _write_share(self, save: _Save, pieces: Sequence[Piece]) -> None:
        for name, data in self._share.others.items():
            save.others.append(write_bytes(save.unfinished / name, data, save.manifest.chunk_bytes))
        file, stored = write_pieces(save.unfinished / self._share.file_name, pieces, save.manifest.states, save.manifest.chunk_bytes)
        write_record(save.unfinished, self._share.rank, file, stored)

    def _finish_save(self, save: _Save) -> None:
        if self._share.rank == 0 and save.written.exception() is None:
            _resolve(save.finished, lambda: self._make_checkpoint(save))

    def _make_checkpoint(self, save: _Save) -> SavedCheckpoint:
        records = [self._wait_for_record(save, rank) for rank in range(self._share.world_size)]
        files = (*(file for file, _ in records), *save.others)
        pieces = tuple(piece for _, of_rank in records for piece in of_rank)
        seal(save.unfinished, replace(save.manifest, files=files, pieces=pieces))
        iteration = save.manifest.iteration
        self._check_lock()
        put_in_place(save.unfinished, iteration_folder(self.directory, iteration), save.token)
        move_latest(self.directory, str(iteration))
        not_deleted = self._delete_old(save)
        return SavedCheckpoint(iteration, sum(file.nbytes for file in files), time.monotonic() - save.started, not_deleted)

    def _wait_for_record(self, save: _Save, rank: int) -> tuple[StoredFile, list[StoredPiece]]:
        deadline = None
        while (record := read_record(save.unfinished, rank)) is None:
            if save.given_up.is_set():
                raise RuntimeError("the save was given up")
            if save.all_written.is_set():
                deadline = deadline or time.monotonic() + VISIBLE_WITHIN_SECONDS
                if time.monotonic() > deadline:
                    raise CheckpointError(f"rank 0 does not see in {save.unfinished} what rank {rank} has written; {SHARED_FOLDER}")
            time.sleep(LOOK_EVERY_SECONDS)
        return record

    def _delete_old(self, save: _Save) -> tuple[int, ...]:
        options = self._options
        if options.keep_last is None and options.retain_interval is None:
            return ()
        complete = complete_iterations(self.directory)
        unwanted = iterations_to_delete(complete, save.manifest.iteration, options.keep_last, options.retain_interval)
        folders = {iteration: iteration_folder(self.directory, iteration) for iteration in unwanted}
        return tuple(iteration for iteration, folder in folders.items() if not delete_checkpoint(folder, save.token))


def _resolve(future: Future[Result], task: Callable[[], Result]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)


def _error_text(task: Callable[[], object]) -> str:
    """The text of the error that the task raises, or an empty string."""
    try:
        task()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
