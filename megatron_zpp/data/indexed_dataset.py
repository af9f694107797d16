"""Reads Megatron's tokenised corpus: PREFIX.bin holds the tokens of all documents, PREFIX.idx says where each one lies.

Samples are cut from sequences. A document is one sequence, or none if it is empty; data from other programs may have several sequences
per document. PREFIX.idx is little-endian, and nothing after its header is aligned (S sequences, D = documents + 1):

    bytes   content
    9       magic
    8       version, 1
    1       dtype code of the tokens
    8       S
    8       D
    4 * S   int32 lengths, in tokens
    8 * S   int64 offsets into PREFIX.bin, in bytes
    8 * D   int64 index of each document's first sequence, then S
"""

import os
import struct
from typing import NamedTuple

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
CODES = {dtype: code for code, dtype in DTYPES.items()}
INDEX_CHUNK_NUMEL = 1 << 20
TOKEN_CHUNK_NUMEL = 1 << 24


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which Megatron stores ids below vocab_size: uint16 if vocab_size is below 65500, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedDataset:
    """The sequences of PREFIX.bin and PREFIX.idx, read through memory maps. Only the prefix is pickled.

    The constructor checks that all sequences lie inside the files, so no later read can go beyond them.
    Raises ValueError for a missing, foreign, truncated or contradictory file, naming what was found and what is needed.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.index_path = f"{prefix}.idx"
        self.token_path = f"{prefix}.bin"
        _require_pair(prefix)
        header = _read_header(self.index_path)
        self.dtype = header.dtype
        index = np.memmap(self.index_path, dtype=np.uint8, mode="r")
        sequences, entries = header.sequence_count, header.document_entry_count
        self.lengths = np.frombuffer(index, "<i4", sequences, HEADER.size)  # [S] tokens
        self.offsets = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)  # [S] bytes
        self.document_starts = np.frombuffer(index, "<i8", entries, HEADER.size + 12 * sequences)  # [D] sequences
        self.token_count = int(self.lengths.sum(dtype=np.int64))
        self._check_consistency()
        self.tokens = _map_tokens(self.token_path, self.dtype)  # [token_count]
        self._mapped = os.stat(self.token_path)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    def read(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of sequence number `document`, or to its end if stop is None; a view in the stored dtype."""
        length = int(self.lengths[document])
        first = int(self.offsets[document]) // self.dtype.itemsize
        return self.tokens[first + start : first + (length if stop is None else min(stop, length))]

    def check_whole(self) -> None:
        """Raises ValueError if the mapped .bin has been cut off since it was opened: reading beyond its end would kill the process.

        A file that has been removed, or replaced by another of its name, is still there for this process.
        """
        try:
            now = os.stat(self.token_path)
        except OSError:
            return
        if now.st_size < self._mapped.st_size and os.path.samestat(now, self._mapped):
            raise ValueError(
                f"{self.token_path} was cut off while it was in use: it had {self._mapped.st_size} bytes, it has {now.st_size}; copy it "
                "again, to another name first, and start the run again."
            )

    def _check_consistency(self) -> None:
        found = os.path.getsize(self.token_path)
        needed = self.token_count * self.dtype.itemsize
        if found < needed:
            raise ValueError(
                f"{self.token_path} is truncated: it has {found} bytes, its .idx needs {needed} "
                f"({self.token_count} tokens of {self.dtype.name}); copy it again or run tools/preprocess_data.py again."
            )
        if found > needed:
            raise ValueError(
                f"{self.token_path} does not belong to its .idx: it has {found} bytes, the .idx needs {needed}; "
                "copy both files of one run of tools/preprocess_data.py."
            )
        if not self._offsets_are_sums_of_lengths() or not self._documents_cover_sequences():
            raise ValueError(
                f"{self.index_path} contradicts itself: its lengths, offsets and document index do not describe one .bin; "
                "write it again with tools/preprocess_data.py."
            )

    def _offsets_are_sums_of_lengths(self) -> bool:
        begin = 0
        for start in range(0, len(self.lengths), INDEX_CHUNK_NUMEL):
            lengths, offsets = (values[start : start + INDEX_CHUNK_NUMEL] for values in (self.lengths, self.offsets))
            ends = begin + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            if int(lengths.min()) < 0 or int(offsets[0]) != begin or not np.array_equal(offsets[1:], ends[:-1]):
                return False
            begin = int(ends[-1])
        return True

    def _documents_cover_sequences(self) -> bool:
        starts = self.document_starts
        if not len(starts) or int(starts[0]) != 0 or int(starts[-1]) != len(self.lengths):
            return False
        chunks = (starts[start : start + INDEX_CHUNK_NUMEL + 1] for start in range(0, len(starts), INDEX_CHUNK_NUMEL))
        return all(bool((chunk[:-1] <= chunk[1:]).all()) for chunk in chunks)


def check_token_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Raises ValueError, naming file, id and document, if a stored id is outside [0, vocab_size).

    Reads the whole .bin once, in chunks, so one rank per node should call it.
    """
    for start in range(0, len(dataset.tokens), TOKEN_CHUNK_NUMEL):
        chunk = dataset.tokens[start : start + TOKEN_CHUNK_NUMEL]
        if int(chunk.max()) < vocab_size and int(chunk.min()) >= 0:
            continue
        position = start + int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
        document = int(np.searchsorted(dataset.offsets, position * dataset.dtype.itemsize, side="right")) - 1
        raise ValueError(
            f"{dataset.token_path} holds token id {int(dataset.tokens[position])} (document {document}), but the vocabulary has "
            f"{vocab_size} ids; give the --vocab-size or --tokenizer-model the data was tokenised with."
        )


class _Header(NamedTuple):
    dtype: np.dtype
    sequence_count: int
    document_entry_count: int


def _require_pair(prefix: str) -> None:
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        if not os.path.isfile(path):
            hint = f", for example {prefix[:-4]}" if prefix.endswith((".bin", ".idx")) else ""
            raise ValueError(
                f"{path} does not exist on this machine; a corpus is named by the common prefix of its .bin and .idx file{hint}, "
                "as tools/preprocess_data.py writes them, on every node."
            )


def _read_header(path: str) -> _Header:
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if head.startswith(LEGACY_MAGIC):
        raise ValueError(f"{path} is in the legacy TNTIDX format (lazy, cached); write the data again with tools/preprocess_data.py.")
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise ValueError(f"{path} starts with {head[: len(MAGIC)]!r}, an .idx file starts with {MAGIC!r}; check the prefix.")
    if len(head) < HEADER.size:
        raise ValueError(f"{path} is truncated: it has {len(head)} bytes, its header alone needs {HEADER.size}; copy it again.")
    _, version, code, sequence_count, document_entry_count = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version}, but version {VERSION} is needed; write the data again with tools/preprocess_data.py."
        )
    if code not in DTYPES:
        known = ", ".join(f"{code} {dtype.name}" for code, dtype in DTYPES.items())
        raise ValueError(f"{path} has dtype code {code}, token ids are one of {known}; write the data again with tools/preprocess_data.py.")
    _check_index_bytes(path, HEADER.size + 12 * sequence_count + 8 * document_entry_count)
    return _Header(DTYPES[code], sequence_count, document_entry_count)


def _check_index_bytes(path: str, needed: int) -> None:
    found = os.path.getsize(path)
    if found < needed:
        raise ValueError(f"{path} is truncated: it has {found} bytes, its header promises {needed}; copy it again.")
    if found > needed:
        raise ValueError(
            f"{path} has {found} bytes, its header promises {needed}; an index with more (a multimodal one) is not supported: "
            "write text alone with tools/preprocess_data.py."
        )


def _map_tokens(path: str, dtype: np.dtype) -> np.ndarray:
    if not os.path.getsize(path):
        return np.empty(0, dtype)  # an empty file cannot be mapped
    # Every slice of an np.memmap is slower than one of a plain array.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
