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
from typing import TypeVar

from megatron_zpp.checkpoint.durable import LOOK_EVERY_SECONDS, SHARED_FOLDER, VISIBLE_WITHIN_SECONDS
from megatron_zpp.checkpoint.folders import (
    Stage,
    complete_iterations,
    delete_checkpoint,
    expendable,
    iteration_folder,
    move_latest,
    put_in_place,
    staged_folder,
)
from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES, CheckpointError, Manifest, StoredFile, StoredPiece
from megatron_zpp.checkpoint.owner import own_token
from megatron_zpp.checkpoint.snapshot import HostSnapshot
from megatron_zpp.checkpoint.unfinished import SPARE_BYTES, check_room, make_unfinished, read_record, seal, write_pieces, write_record
from megatron_zpp.parallel.initialize import gather_texts, joined_errors
from megatron_zpp.zero.pieces import Piece

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
    """A save under way. copied: this rank's state. written: by this rank. finished: by rank 0, who makes a checkpoint of what all wrote."""

    manifest: Manifest
    unfinished: Path
    token: str
    started: float = field(default_factory=time.monotonic)
    all_written: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    copied: Future[None] = field(default_factory=Future)
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
        """Saves the state as it is now. With in_background it returns None, and the state must not change before `wait_for_copy`.

        Otherwise it returns as `finish`.
        manifest: all of it but files and pieces. Raises CheckpointError, alike on every rank, where it cannot be written.
        """
        self.finish()
        final = iteration_folder(self.directory, manifest.iteration)
        token = self._begin(final)
        save = _Save(manifest, staged_folder(final, Stage.UNFINISHED, token), token)
        self._save, self._is_reported = save, False
        if self._snapshot is not None:
            self._snapshot.begin()
            threading.Thread(target=self._save_in_background, args=(save, self._snapshot), name="checkpoint", daemon=True).start()
            return None
        _settle(save.written, lambda: self._write_share(save, self._share.pieces))
        self._agree_on(save)
        self._finish_save(save)
        return self.finish()

    def wait_for_copy(self) -> None:
        """Returns when a save in the background needs the state no more: before that it must not change."""
        if self._snapshot is not None and self._save is not None:
            self._save.copied.result()

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
        needed_bytes = sum(nbytes for _, _, nbytes in answers) + SPARE_BYTES
        self._agree(_failure_of(lambda: check_room(folder, needed_bytes)), folder)
        return token

    # ---- what may run in a thread

    def _save_in_background(self, save: _Save, snapshot: HostSnapshot) -> None:
        _settle(save.copied, snapshot.copy)
        _settle(save.written, lambda: self._write_copy(save, snapshot))
        self._finish_save(save)

    def _write_copy(self, save: _Save, snapshot: HostSnapshot) -> None:
        save.copied.result()
        self._write_share(save, snapshot.pieces)

    def _write_share(self, save: _Save, pieces: Sequence[Piece]) -> None:
        file, stored = write_pieces(save.unfinished / self._share.file_name, pieces, save.manifest.chunk_bytes)
        write_record(save.unfinished, self._share.rank, file, stored)

    def _finish_save(self, save: _Save) -> None:
        if self._share.rank == 0 and save.written.exception() is None:
            _settle(save.finished, lambda: self._make_checkpoint(save))

    def _make_checkpoint(self, save: _Save) -> SavedCheckpoint:
        records = [self._wait_for_record(save, rank) for rank in range(self._share.world_size)]
        files = tuple(file for file, _ in records)
        pieces = tuple(piece for _, of_rank in records for piece in of_rank)
        seal(save.unfinished, replace(save.manifest, files=files, pieces=pieces))
        iteration = save.manifest.iteration
        put_in_place(save.unfinished, iteration_folder(self.directory, iteration), save.token)
        move_latest(self.directory, str(iteration))
        not_deleted = self._delete_expendable(save)
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

    def _delete_expendable(self, save: _Save) -> tuple[int, ...]:
        options = self._options
        if options.keep_last is None and options.retain_interval is None:
            return ()
        complete = complete_iterations(self.directory)
        unwanted = expendable(complete, save.manifest.iteration, options.keep_last, options.retain_interval)
        folders = {iteration: iteration_folder(self.directory, iteration) for iteration in unwanted}
        return tuple(iteration for iteration, folder in folders.items() if not delete_checkpoint(folder, save.token))


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
