"""Writes a tokenised corpus in the format of `indexed_dataset`. Everything is streamed to disk; nothing stays in memory.

    PREFIX.bin.partial   the tokens so far
    PREFIX.idx.partial   room for the header, then the lengths so far
    PREFIX.doc.partial   int64 number of sequences before each document's end

`complete` writes the header before the lengths, and the offsets and the document index after them. `publish` gives the .bin and the .idx
file their final names.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np

from megatron_zpp.data.indexed_dataset import CODES, HEADER, INDEX_CHUNK_NUMEL, MAGIC, VERSION, IndexedDataset, chunks_of
from megatron_zpp.system.output_file import kept_file, naming_file, sync_folder
from megatron_zpp.system.user_error import UserError

COPY_BYTES = 1 << 24
LONGEST_SEQUENCE = np.iinfo(np.int32).max


class Extent(NamedTuple):
    """How much a writer has written."""

    token_count: int = 0
    sequence_count: int = 0
    document_count: int = 0


class IndexedDatasetWriter:
    """Appends documents to partial files. `finalize` turns them into PREFIX.bin and PREFIX.idx and replaces an old pair of that name.

    start: resume the partial files of an earlier writer from this extent; what they hold beyond it is cut off.

    A context manager: leaving the block removes the partial files, with or without an error, unless `finalize` was called.
    Raises UserError if another process is writing this prefix.
    """

    def __init__(self, prefix: str, dtype: np.dtype, start: Extent | None = None) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise UserError(f"{prefix}.bin cannot hold {dtype}; use one of {', '.join(d.name for d in CODES)}.")
        needed = self._needed_bytes(start or Extent())
        found = needed if start else (0, 0, 0)
        self._token_file = open_partial(f"{prefix}.bin", found[0])
        _lock(self._token_file, prefix)
        self._length_file = open_partial(f"{prefix}.idx", found[1])
        self._document_file = open_partial(f"{prefix}.doc", found[2])
        for file, size in zip(self._files, needed, strict=True):
            file.truncate(size)
            file.seek(size)
        self._extent = start or Extent()

    @property
    def extent(self) -> Extent:
        return self._extent

    @property
    def token_count(self) -> int:
        return self._extent.token_count

    @property
    def document_count(self) -> int:
        return self._extent.document_count

    def add_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends one document, which may be empty. Raises UserError for an id that the dtype cannot hold."""
        self.add_documents(np.asarray(tokens), [len(tokens)])

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Appends documents of one sequence each. tokens: [sum of lengths], one document after the other."""
        self.add_sequences(tokens, lengths, np.arange(1, len(lengths) + 1))

    def add_sequences(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray, document_ends: Sequence[int] | np.ndarray) -> None:
        """Appends sequences. tokens: [sum of lengths], one sequence after the other.

        document_ends: [documents] how many of these sequences lie before each document's end, ascending.
        Raises UserError for a sequence that the file cannot hold, and RuntimeError if the arguments contradict each other.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        ends = np.asarray(document_ends, dtype=np.int64)
        if int(lengths.sum()) != len(tokens) or (int(ends[-1]) if len(ends) else 0) != len(lengths):
            raise RuntimeError(f"{self.prefix}: {len(tokens)} tokens and {len(ends)} documents for lengths {lengths}")
        if len(lengths) and int(lengths.max()) > LONGEST_SEQUENCE:
            raise UserError(f"{self.prefix}.idx cannot hold a document of {int(lengths.max())} tokens; split it: {LONGEST_SEQUENCE} fit.")
        stored = self._stored(tokens)
        with self._naming_files():
            self._token_file.write(stored.data)
            self._length_file.write(lengths.astype("<i4").data)
            self._document_file.write((self._extent.sequence_count + ends).astype("<i8").data)
        self._advance(len(tokens), len(lengths), len(ends))

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Appends all documents of another corpus. Raises UserError if that has another dtype."""
        if dataset.dtype != self.dtype:
            raise UserError(
                f"{dataset.token_path} holds {dataset.dtype.name}, but {self.dtype.name} is needed; tokenise both with one vocabulary."
            )
        step = COPY_BYTES // self.dtype.itemsize
        for start in range(0, dataset.token_count, step):
            tokens = dataset.read_tokens(start, min(start + step, dataset.token_count))
            with self._naming_files():
                self._token_file.write(tokens.data)
        with self._naming_files():
            for lengths in chunks_of(dataset.lengths):
                self._length_file.write(lengths.data)
            for ends in chunks_of(dataset.document_starts, first=1):
                self._document_file.write((self._extent.sequence_count + ends).astype("<i8").data)
        self._advance(dataset.token_count, len(dataset.lengths), len(dataset.document_starts) - 1)

    def finalize(self) -> None:
        """Completes the partial files and renames them to PREFIX.bin and PREFIX.idx."""
        self.complete()
        publish(self.prefix)
        self.close()

    def sync(self) -> None:
        """Makes everything up to the extent durable, so that it survives a loss of power."""
        with self._naming_files():
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())

    def complete(self) -> None:
        """Makes the partial files hold the complete corpus, durably. Call `publish` next, then `close`, which releases the lock."""
        with self._naming_files():
            self._length_file.flush()
            self._document_file.flush()
            for block in self._index_blocks():
                self._length_file.write(block.data)
            self._length_file.seek(0)
            sequences, entries = self._extent.sequence_count, self._extent.document_count + 1
            self._length_file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], sequences, entries))
        self.sync()

    def close(self) -> None:
        """Closes the partial files and keeps them for a later writer."""
        for file in self._files:
            file.close()

    def discard(self) -> None:
        """Closes and removes the partial files."""
        for file in self._files:
            with suppress(OSError):  # on a full disk, a file cannot take what is still buffered
                file.close()
        for path in partial_paths(self.prefix):
            with suppress(FileNotFoundError):
                os.remove(path)

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.discard()

    @property
    def _files(self) -> tuple[BinaryIO, BinaryIO, BinaryIO]:
        return self._token_file, self._length_file, self._document_file

    def _naming_files(self) -> AbstractContextManager[None]:
        """Gives the errors of the system in the block the name of the corpus."""
        return naming_file(Path(f"{self.prefix}.bin"))

    def _needed_bytes(self, extent: Extent) -> tuple[int, int, int]:
        lengths = HEADER.size + 4 * extent.sequence_count
        return extent.token_count * self.dtype.itemsize, lengths, 8 * extent.document_count

    def _advance(self, tokens: int, sequences: int, documents: int) -> None:
        extent = self._extent
        self._extent = Extent(extent.token_count + tokens, extent.sequence_count + sequences, extent.document_count + documents)

    def _stored(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.dtype != self.dtype and len(tokens):
            limits = np.iinfo(self.dtype)
            if int(tokens.min()) < limits.min or int(tokens.max()) > limits.max:
                raise UserError(
                    f"{self.prefix}.bin stores {self.dtype.name} and cannot hold the token ids {int(tokens.min())} to {int(tokens.max())}; "
                    "give the --vocab-size or --tokenizer-model that the ids belong to."
                )
        return np.ascontiguousarray(tokens, dtype=self.dtype)

    def _index_blocks(self) -> Iterator[np.ndarray]:
        begin = 0
        with open(f"{self.prefix}.idx.partial", "rb") as lengths:
            lengths.seek(HEADER.size)
            for count in _chunk_numels(self._extent.sequence_count):
                ends = begin + np.cumsum(np.fromfile(lengths, "<i4", count), dtype=np.int64) * self.dtype.itemsize
                yield np.concatenate(([begin], ends[:-1])).astype("<i8")
                begin = int(ends[-1])
        yield np.zeros(1, "<i8")
        with open(f"{self.prefix}.doc.partial", "rb") as documents:
            for count in _chunk_numels(self._extent.document_count):
                yield np.fromfile(documents, "<i8", count)


def partial_paths(prefix: str) -> tuple[str, str, str]:
    """The files of a writer of this prefix before `publish`."""
    return f"{prefix}.bin.partial", f"{prefix}.idx.partial", f"{prefix}.doc.partial"


def publish(prefix: str) -> None:
    """Gives completed partial files their final names. It may be called again if an earlier call was interrupted.

    At no moment does an .idx stand beside the .bin of another run: an old .idx goes first, and a new one comes last. The folder is synced
    in between, because a loss of power may undo any of the changes since then and keep later ones.
    """
    tokens, index, documents = partial_paths(prefix)
    folder = Path(prefix).parent
    if os.path.exists(tokens):
        with suppress(FileNotFoundError):
            os.remove(f"{prefix}.idx")
        sync_folder(folder)
        os.replace(tokens, f"{prefix}.bin")
    if os.path.exists(index):
        sync_folder(folder)
        os.replace(index, f"{prefix}.idx")
    with suppress(FileNotFoundError):
        os.remove(documents)
    sync_folder(folder)


def open_partial(path: str, needed_bytes: int) -> BinaryIO:
    """The partial file of path, opened but not emptied, as it may belong to another writer that is running.

    Raises UserError if it has fewer than needed_bytes.
    """
    file = open(kept_file(f"{path}.partial"), "r+b")
    found = os.fstat(file.fileno()).st_size
    if found < needed_bytes:
        file.close()
        raise UserError(f"{path}.partial has {found} bytes, {needed_bytes} were written; remove the partial files and start anew.")
    return file


def refuse_if_written(prefix: str) -> None:
    """Raises UserError if another process is writing this prefix."""
    with suppress(FileNotFoundError), open(f"{prefix}.bin.partial", "r+b") as file:
        _lock(file, prefix)


def _lock(file: BinaryIO, prefix: str) -> None:
    # The system releases this lock in any case when the process ends; worker processes do not inherit it.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_taken = not _is_at(file, f"{prefix}.bin.partial")
    except (BlockingIOError, PermissionError):
        is_taken = True
    except OSError:
        # The file system has no locks, so the user must avoid two writers of one prefix.
        return
    if is_taken:
        file.close()
        raise UserError(f"{prefix}.bin is being written by another process; wait for it, or choose another prefix.")


def _is_at(file: BinaryIO, path: str) -> bool:
    """Whether the open file still has this name: a writer that has just finished may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _chunk_numels(count: int) -> Iterator[int]:
    return (min(INDEX_CHUNK_NUMEL, count - start) for start in range(0, count, INDEX_CHUNK_NUMEL))
