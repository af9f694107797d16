"""Saves checkpoints: every rank writes its own pieces into an unfinished folder, and then rank 0 turns it into a checkpoint.

The steps of a save, and what is on the disk after each:

    1 rank 0 makes iter_N.tmp-TOKEN                       a leftover, deleted by the next save
    2 every rank writes and fsyncs rank_R.safetensors
    3 every rank writes rank_R.json: its pieces and checksums
    4 rank 0 writes manifest.json, then complete.json
    5 rank 0 renames the folder to iter_N                 a complete checkpoint; `latest` still names the one before
    6 rank 0 moves `latest`                               the checkpoint to load
    7 rank 0 deletes what --keep-last and --save-retain-interval do not keep

In steps 2 to 7 of an asynchronous save no rank waits in a collective of the world. Each rank writes in a background thread, and the thread
of rank 0 polls for the files of step 3.

Where every node has a disk of its own, the first rank of each node does what rank 0 does here. These ranks tell each other what is in
their records, so that every manifest names the files of all nodes, and send each other the copies that are asked for (`copies`) before
step 4. None begins with step 5, 6 or 7 before all have done the one before, so a checkpoint that some `latest` names is on all disks. One
that a crash leaves with its name on some disks only has been written on all; `parts.finish_interrupted_save` names it on the others. A
thread does the steps from 4 on in every such save. Meanwhile the main threads of all ranks wait in one short collective after the other,
because copies may take longer than a collective.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from megatron_zpp.checkpoint.copies import ROUNDS_AT_A_TIME, Copies
from megatron_zpp.checkpoint.disk import Disk, Gather, Messages, raise_if_any_failed
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
from megatron_zpp.checkpoint.manifest import ELEMENT_BYTES, ELEMENT_TYPE, CheckpointError, Manifest, StoredFile, manifest_of
from megatron_zpp.checkpoint.parts import finish_interrupted_save
from megatron_zpp.checkpoint.shard_file import write_bytes
from megatron_zpp.checkpoint.snapshot import HostSnapshot
from megatron_zpp.checkpoint.unfinished import (
    SPARE_BYTES,
    Record,
    check_room,
    make_unfinished,
    read_record,
    seal,
    write_pieces,
    write_record,
)
from megatron_zpp.parallel.initialize import joined_errors
from megatron_zpp.system.owner import own_token
from megatron_zpp.zero.pieces import Piece
from megatron_zpp.zero.policy import WEIGHT

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
    """A complete checkpoint. copied_bytes: that came to this disk from others.

    not_deleted: iterations that could not be deleted, because they are being read or the file system refuses.
    """

    iteration: int
    nbytes: int
    copied_bytes: int
    seconds: float
    not_deleted: tuple[int, ...]


class _Watched:
    """Messages among first ranks in the thread that finishes a save, and what its main thread wants to know.

    latest: when something has last gone on there. waits: whether the thread waits for others.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.latest = time.monotonic()
        self.waits = False

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.latest, self.waits = time.monotonic(), True
        try:
            yield
        finally:
            self.latest, self.waits = time.monotonic(), False

    def gather(self, text: str) -> list[str]:
        with self._waiting():
            return self._messages.gather(text)

    def exchange(self, sent: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        with self._waiting():
            return self._messages.exchange(sent, numels)


@dataclass(frozen=True)
class _Save:
    """A save in progress. firsts: messages among the first ranks of all disks. others: of Share, once they are on disk.

    copied: this rank's state is in the snapshot. written: this rank's files are on disk. sealed: so are all files of this disk, with the
    manifest of all disks.
    finished: the first rank of this disk has completed the checkpoint.
    """

    manifest: Manifest
    unfinished: Path
    token: str
    firsts: _Watched
    others: list[StoredFile] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    all_written: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    sealed: threading.Event = field(default_factory=threading.Event)
    copied: Future[None] = field(default_factory=Future)
    written: Future[None] = field(default_factory=Future)
    finished: Future[SavedCheckpoint] = field(default_factory=Future)


class CheckpointSaver:
    """Saves checkpoints into `directory` on the rank's disk. Every rank must make the same calls. One save runs at a time.

    gather: returns the text of every rank, in rank order. check_lock: raises CheckpointError if this run may not save there any more; the
    first rank of each disk calls it before anything is written and before the checkpoint gets its name. disk: by default, all ranks
    share one. count_copied: receives bytes that come from other disks, in a thread of the first rank of each disk.
    """

    def __init__(
        self,
        directory: Path,
        share: Share,
        options: SaveOptions,
        gather: Gather,
        check_lock: Callable[[], None] = lambda: None,
        disk: Disk | None = None,
        count_copied: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.directory = directory
        self._share = share
        self._disk = disk or Disk.of_all(share.rank, share.world_size)
        self._options = options
        self._gather = gather
        self._check_lock = check_lock
        self._count_copied = count_copied
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
        held = deepcopy(manifest)  # it is written when training has gone on, and what it was made of has changed
        save = _Save(held, staged_folder(final, Stage.UNFINISHED, token), token, _Watched(self._disk.firsts_in_background))
        self._save, self._is_reported = save, False
        if self._snapshot is not None:
            self._snapshot.begin()
            threading.Thread(target=self._save_in_background, args=(save, self._snapshot), name="checkpoint", daemon=True).start()
            return None
        _resolve(save.written, lambda: self._write_share(save, self._share.pieces))
        self._wait_until_all_wrote(save)
        if self._disk.count == 1:
            self._finish_save(save)
        elif self._disk.is_first:
            threading.Thread(target=self._finish_save, args=(save,), name="checkpoint", daemon=True).start()
        return self.finish()

    def wait_for_copy(self) -> None:
        """Waits until a background save has copied the state. Before that the state must not change."""
        if self._snapshot is not None and self._save is not None:
            self._save.copied.result()

    def check(self) -> SavedCheckpoint | None:
        """The checkpoint finished since the last call, or None. The first rank of a disk gets one; the others learn of it in `finish`.

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
        while not all(self._gather("yes" if self._is_over(save) else "")):
            pass  # copies may take longer than the limit of one gather, in which the ranks wait that have nothing to finish
        error = _error_text(save.finished.result) if self._disk.is_first else ""
        # Another disk may have named what is sealed here. The next save, or the next run, asks all of them.
        self._raise_if_any_failed(error, save.unfinished, is_kept=self._disk.count > 1 and save.sealed.is_set())
        self._save, self._is_reported = None, True
        return save.finished.result() if self._share.rank == 0 and not was_reported else None

    def _wait_until_all_wrote(self, save: _Save) -> None:
        """Returns when every rank has written its share."""
        try:
            self._raise_if_any_failed(_error_text(save.written.result), save.unfinished)
        except CheckpointError:
            save.given_up.set()
            save.firsts.latest = time.monotonic()
            if self._disk.is_first and self._snapshot is not None:
                while not self._is_over(save):  # its thread may still be telling the other disks
                    pass
            raise
        save.all_written.set()
        save.firsts.latest = time.monotonic()

    def _is_over(self, save: _Save) -> bool:
        """Whether this rank has finished the save, or has nothing to finish. Waits for it a part of the disk's limit."""
        if not self._disk.is_first:
            return True
        limit = self._disk.limit_seconds
        try:
            save.finished.exception(None if limit is None else limit / 4)
        except TimeoutError:
            if limit is not None and time.monotonic() - save.firsts.latest > limit:
                where = "the disks of other nodes have" if save.firsts.waits else f"the disk of this node, with {self.directory}, has"
                raise RuntimeError(f"{where} not gone on with a save for {limit:.0f} s") from None
            return False
        return True

    def _raise_if_any_failed(self, error: str, unfinished: Path, *, is_kept: bool = False) -> None:
        """Raises CheckpointError on every rank, and deletes the unfinished folder unless it is kept, if any rank has an error."""
        errors = self._gather(error)
        if not any(errors):
            return
        self._save = None
        if self._disk.is_first and not is_kept:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(joined_errors(errors))

    # ---- before anything is written

    def _create_folder(self, final: Path) -> str:
        """Creates the unfinished folder and returns its token. Checks that every rank sees the folder and that the disk has room."""
        token, error = "", ""
        if self._disk.count > 1:
            self._finish_interrupted_save()
        if self._disk.is_first:
            token = own_token()
            error = _error_text(lambda: self._make_folder(staged_folder(final, Stage.UNFINISHED, token)))
        answers = [json.loads(text) for text in self._gather(json.dumps([token, error, self._share.nbytes]))]
        on_disk = [answers[rank] for index in (self._disk.index, *self._disk.copied_here) for rank in self._disk.ranks_of(index)]
        token, _, _ = on_disk[0]
        folder = staged_folder(final, Stage.UNFINISHED, token)
        errors = [error for _, error, _ in answers]
        if any(errors):
            if self._disk.is_first:
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(joined_errors(errors) if self._disk.count > 1 else errors[0])
        needed_bytes = sum(nbytes for _, _, nbytes in on_disk) + SPARE_BYTES
        self._raise_if_any_failed(_error_text(lambda: check_room(folder, needed_bytes)), folder)
        return token

    def _finish_interrupted_save(self) -> None:
        """Raises CheckpointError on every rank, before anything is deleted, if a checkpoint does not get its name on a disk."""
        error = ""
        if self._disk.is_first:
            error = _error_text(lambda: finish_interrupted_save(self.directory, self._disk, self._check_lock))
        errors = self._gather(error)
        if any(errors):
            raise CheckpointError(joined_errors(errors))

    def _make_folder(self, unfinished: Path) -> None:
        self._check_lock()
        make_unfinished(unfinished)

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
        record = write_pieces(save.unfinished / self._share.file_name, pieces, save.manifest.states, save.manifest.chunk_bytes)
        write_record(save.unfinished, self._share.rank, record)

    def _finish_save(self, save: _Save) -> None:
        if self._disk.is_first:
            _resolve(save.finished, lambda: self._make_checkpoint(save))

    def _make_checkpoint(self, save: _Save) -> SavedCheckpoint:
        manifest, records = self._what_was_written(save)
        copies = self._copied(save, [record.files for record in records])
        record, own_files = Record.joined(records), (*records[self._disk.index].files, *copies)
        disks = {"disks": self._disk.count, "copies": self._disk.copies} if self._disk.count > 1 else {}
        manifest = replace(manifest, files=record.files, pieces=record.pieces, topology={**manifest.topology, **disks})
        markers = self._on_all_disks(save, lambda: self._seal(save, manifest, own_files))
        if len(set(markers)) > 1:
            raise RuntimeError(f"the manifests of the nodes differ: {', '.join(map(str.strip, markers))}")
        self._on_all_disks(save, lambda: self._put_in_place(save))
        self._on_all_disks(save, lambda: move_latest(self.directory, str(manifest.iteration)))
        not_deleted = {iteration for of_disk in self._on_all_disks(save, lambda: self._delete_old(save)) for iteration in of_disk}
        seconds = time.monotonic() - save.started
        nbytes, copied_bytes = (sum(file.nbytes for file in files) for files in (record.files, copies))
        return SavedCheckpoint(manifest.iteration, nbytes, copied_bytes, seconds, tuple(sorted(not_deleted)))

    def _what_was_written(self, save: _Save) -> tuple[Manifest, list[Record]]:
        """The manifest of rank 0, as the paths in the flags of others may differ, and what the ranks of each disk have written there."""

        def on_own_disk() -> Record:
            save.written.result()  # an error of this rank reaches the other disks as that of this step
            return Record.joined([*(self._wait_for_record(save, rank) for rank in self._disk.ranks), Record(tuple(save.others))])

        if self._disk.count == 1:
            return save.manifest, [on_own_disk()]
        found = self._on_all_disks(save, lambda: (on_own_disk().to_json(), save.manifest.to_json() if self._share.rank == 0 else ""))
        records = [Record.from_other_disk(text, f"the record of node {index}") for index, (text, _) in enumerate(found)]
        return manifest_of(iteration_folder(self.directory, save.manifest.iteration), found[0][1].encode()), records

    def _copied(self, save: _Save, files: Sequence[Sequence[StoredFile]]) -> tuple[StoredFile, ...]:
        """Copies files to other disks. files: by disk, what its ranks have written. Returns those that have come to this one."""
        if self._disk.copies == 1:
            return ()
        copies = Copies(save.unfinished, self._disk, save.firsts, files, save.manifest.chunk_bytes, self._count_copied)
        for first in range(0, copies.rounds, ROUNDS_AT_A_TIME):
            self._on_all_disks(save, partial(copies.exchange, range(first, min(first + ROUNDS_AT_A_TIME, copies.rounds))))
        return copies.files

    def _on_all_disks(self, save: _Save, task: Callable[[], Result]) -> list[Result]:
        """Does a part of the task on the first rank of every disk, and returns the answers, which must be JSON, when all are done.

        Raises CheckpointError on all of them if it fails on one.
        """
        if self._disk.count == 1:
            return [task()]
        future: Future[Result] = Future()
        _resolve(future, task)
        error = _error_text(future.result)
        own = json.dumps([None if error else future.result(), error])
        answers = [json.loads(text) for text in save.firsts.gather(own)]
        raise_if_any_failed([error for _, error in answers])
        return [answer for answer, _ in answers]

    def _seal(self, save: _Save, manifest: Manifest, own_files: Sequence[StoredFile]) -> str:
        marker = seal(save.unfinished, manifest, own_files)
        save.sealed.set()
        return marker

    def _put_in_place(self, save: _Save) -> None:
        self._check_lock()
        put_in_place(save.unfinished, iteration_folder(self.directory, save.manifest.iteration), save.token)

    def _wait_for_record(self, save: _Save, rank: int) -> Record:
        deadline = None
        while (record := read_record(save.unfinished, rank)) is None:
            if save.given_up.is_set():
                raise RuntimeError("the save was given up")
            if save.all_written.is_set():
                deadline = deadline or time.monotonic() + VISIBLE_WITHIN_SECONDS
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"rank {self._disk.rank} does not see in {save.unfinished} what rank {rank} has written; {SHARED_FOLDER}"
                    )
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
