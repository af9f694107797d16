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

import glob
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_zpp.config.data_sources import number_in
from megatron_zpp.data.data_file import DataFile
from megatron_zpp.data.stored_array import Rows, StoredArray, held_if_small
from megatron_zpp.system.near_names import nearest_name
from megatron_zpp.system.outside import is_encodable
from megatron_zpp.system.user_error import UserError

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
CODES = {dtype: code for code, dtype in DTYPES.items()}
INDEX_CHUNK_NUMEL = 1 << 20
TOKEN_CHUNK_NUMEL = 1 << 24
CHECKED_DOCUMENTS = 100  # documents whose end is looked at
DIGESTED_DOCUMENTS, DIGESTED_TOKENS = 4, 64  # of which a digest is made, because documents of one length are common
CUT_OFF_REMEDY = "copy it again, to another name first, and start the run again."


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which Megatron stores ids below vocab_size: uint16 if vocab_size is below 65500, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedDataset:
    """The sequences of PREFIX.bin and PREFIX.idx, of which only what is used is read. Only the prefix is pickled.

    The constructor checks that all sequences lie inside the files. Raises UserError for a missing, foreign, truncated or contradictory
    file, naming what was found and what is needed; every read does if a file has been cut off since.

    prefix: of both files. dtype: of the stored ids. lengths: [sequences] int32, in tokens. offsets: [sequences] int64, bytes in the .bin.
    document_starts: [documents + 1] int64, the first sequence of each document, then the number of sequences.
    token_count: tokens of all sequences. len() is the number of sequences.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.index_path = f"{prefix}.idx"
        self.token_path = f"{prefix}.bin"
        _require_pair(prefix)
        index = _open(self.index_path)
        header = _read_header(index)
        self.dtype = header.dtype
        sequences, entries = header.sequence_count, header.document_entry_count
        self.lengths = _part(index, "<i4", sequences, HEADER.size)  # [S] tokens
        self.offsets = _part(index, "<i8", sequences, HEADER.size + 4 * sequences)  # [S] bytes
        self.document_starts = _part(index, "<i8", entries, HEADER.size + 12 * sequences)  # [D] sequences
        self.token_count = sum(int(lengths.sum(dtype=np.int64)) for lengths in chunks_of(self.lengths))
        self._token_file = _open(self.token_path)
        self._check_consistency()

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    def read(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens [start, stop) of sequence number `document`, or to its end if stop is None; in the stored dtype."""
        return self.read_in_turn((document,), start, self.token_count if stop is None else stop)

    def read_in_turn(self, documents: Sequence[int], start: int, stop: int) -> np.ndarray:
        """These sequences one after the other, from token `start` of the first one to before token `stop` of the last one."""
        read, item_bytes, last = self._token_file.read, self.dtype.itemsize, len(documents) - 1
        parts = []
        for place, document in enumerate(documents):
            begin, end = self._extent(document)
            if place == last:
                end = min(end, begin + stop * item_bytes)
            if place == 0:
                begin += start * item_bytes
            parts.append(read(begin, max(0, end - begin)))
        return np.frombuffer(b"".join(parts), self.dtype)

    def read_tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of all tokens, one sequence after the other; in the stored dtype."""
        item_bytes = self.dtype.itemsize
        return np.frombuffer(self._token_file.read(start * item_bytes, (stop - start) * item_bytes), self.dtype)

    def tokens_before(self, document: int) -> int:
        """The tokens of all sequences before this one; all tokens if it is the number of sequences."""
        return self.token_count if document == len(self) else self._extent(document)[0] // self.dtype.itemsize

    def lengths_digests(self, counts: Iterable[int]) -> dict[int, str]:
        """The SHA-256 of the lengths of the first so many sequences, as stored, by their number. They are read once."""
        digest, done, found = hashlib.sha256(), 0, dict[int, str]()
        chunk, first = self.lengths[:0], 0
        for count in sorted(set(counts)):
            while done < count:
                if done == first + len(chunk):
                    first, chunk = done, self.lengths[done : done + INDEX_CHUNK_NUMEL]
                stop = min(count, first + len(chunk))
                digest.update(chunk[done - first : stop - first].data)
                done = stop
            found[count] = digest.hexdigest()
        return found

    def beginnings_digest(self, count: int) -> str:
        """The SHA-256 of the first tokens of a few of the first `count` sequences, evenly apart; the same in every stored dtype."""
        digest = hashlib.sha256()
        places = range(DIGESTED_DOCUMENTS) if count else ()
        for document in sorted({place * (count - 1) // (DIGESTED_DOCUMENTS - 1) for place in places}):
            digest.update(self.read(document, 0, DIGESTED_TOKENS).astype("<i8").data)
        return digest.hexdigest()

    def last_tokens(self) -> set[int]:
        """The ids in which the first documents end, without those of empty ones; one id if all end in the EOD."""
        ends = (self.read(document)[-1:] for document in range(min(CHECKED_DOCUMENTS, len(self))))
        return {int(end[0]) for end in ends if len(end)}

    def _extent(self, document: int) -> tuple[int, int]:
        """The bytes of a sequence: begin and end in the .bin."""
        begin, *after = self.offsets[document : document + 2].tolist()  # one read
        return begin, after[0] if after else self._token_file.nbytes

    def _check_consistency(self) -> None:
        found = self._token_file.nbytes
        needed = self.token_count * self.dtype.itemsize
        if found < needed:
            raise UserError(
                f"{self.token_path} is truncated: it has {found} bytes, its .idx needs {needed} "
                f"({self.token_count} tokens of {self.dtype.name}); copy it again or run tools/preprocess_data.py again."
            )
        if found > needed:
            raise UserError(
                f"{self.token_path} does not belong to its .idx: it has {found} bytes, the .idx needs {needed}; "
                "copy both files of one run of tools/preprocess_data.py."
            )
        if not self._offsets_are_sums_of_lengths() or not self._documents_cover_sequences():
            raise UserError(
                f"{self.index_path} contradicts itself: its lengths, offsets and document index do not describe one .bin; "
                "write it again with tools/preprocess_data.py."
            )

    def _offsets_are_sums_of_lengths(self) -> bool:
        begin = 0
        for lengths, offsets in zip(chunks_of(self.lengths), chunks_of(self.offsets), strict=True):
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
    """Raises UserError, naming file, id and document, if a stored id is outside [0, vocab_size).

    Reads the whole .bin once, in chunks, so one rank per node should call it.
    """
    for start in range(0, dataset.token_count, TOKEN_CHUNK_NUMEL):
        chunk = dataset.read_tokens(start, min(start + TOKEN_CHUNK_NUMEL, dataset.token_count))
        if int(chunk.max()) < vocab_size and int(chunk.min()) >= 0:
            continue
        place = int(np.argmax((chunk >= vocab_size) | (chunk < 0)))
        offset = (start + place) * dataset.dtype.itemsize
        document = sum(int(np.searchsorted(offsets, offset, side="right")) for offsets in chunks_of(dataset.offsets)) - 1
        raise UserError(
            f"{dataset.token_path} holds token id {int(chunk[place])} (document {document}), but the vocabulary has "
            f"{vocab_size} ids; give the --vocab-size or --tokenizer-model the data was tokenised with."
        )


def chunks_of(values: Rows, first: int = 0) -> Iterator[np.ndarray]:
    """The values from number `first` on, INDEX_CHUNK_NUMEL of them at a time."""
    return (values[start : start + INDEX_CHUNK_NUMEL] for start in range(first, len(values), INDEX_CHUNK_NUMEL))


class _Header(NamedTuple):
    dtype: np.dtype
    sequence_count: int
    document_entry_count: int


def _require_pair(prefix: str) -> None:
    for path in (f"{prefix}.idx", f"{prefix}.bin"):
        if not os.path.isfile(path):
            hint = _hint(prefix)
            raise UserError(
                f"{path} does not exist on this machine; {hint} corpus is named by the common prefix of its .bin and .idx file, and both "
                "have to be on every node; tools/preprocess_data.py makes them from JSON lines."
            )


def _hint(prefix: str) -> str:
    """What comes before `corpus is named by` in the error about a missing corpus."""
    meant = _meant(prefix)
    if meant is not None:
        return f"did you mean {meant}? A"
    if "," in prefix:
        return "several corpora are separated by blanks. A"
    return "a" if number_in(prefix) is None else f"if {prefix} is a weight, every corpus needs one before it. A"


def _meant(words: str) -> str | None:
    """The prefix that was probably meant by words that name no corpus: of this file, made from this text, or of a like name."""
    if "\0" in words or not is_encodable(words):
        return None  # no file has such a name
    prefix = next(
        (words.removesuffix(ending) for ending in (".bin", ".idx", ".jsonl", ".json") if words.endswith(ending)), words.rstrip("/")
    )
    if prefix != words and os.path.isfile(f"{prefix}.idx"):
        return prefix
    if any(os.path.isfile(f"{words}.{ending}") for ending in ("idx", "bin")):
        return None  # one of its two files is missing
    made = sorted(glob.glob(f"{glob.escape(prefix)}_*_document.idx"))
    if made:
        return made[0].removesuffix(".idx")
    folder, name = os.path.split(prefix)
    elsewhere = sorted(
        glob.glob(f"{glob.escape(name)}/*.idx" if os.path.isdir(prefix) else f"*/{glob.escape(name)}.idx", root_dir=folder or ".")
    )
    if elsewhere:
        return os.path.join(folder, elsewhere[0].removesuffix(".idx"))
    corpora = [path.removesuffix(".idx") for path in glob.glob("*.idx", root_dir=folder or ".")]
    by_spelling = {spelling: corpus for corpus in corpora for spelling in (corpus, *_beginnings(corpus))}
    near = filter(None, (nearest_name(spelling, by_spelling) for spelling in _beginnings(name) or [name]))
    return next((os.path.join(folder, by_spelling[spelling]) for spelling in near), None)


def _beginnings(corpus: str) -> list[str]:
    """The beginnings of a name that tools/preprocess_data.py gives, PREFIX_KEY_document; their common endings make all names alike."""
    of_key = corpus.removesuffix("_document")
    return [] if of_key == corpus else [of_key, of_key.rpartition("_")[0]]


def _open(path: str) -> DataFile:
    try:
        return DataFile(path, CUT_OFF_REMEDY)
    except OSError as error:
        raise UserError(f"{path} cannot be opened ({error.strerror}); every rank must be able to read it.") from error


def _read_header(file: DataFile) -> _Header:
    path = file.path
    head = file.read(0, min(HEADER.size, file.nbytes))
    if head.startswith(LEGACY_MAGIC):
        raise UserError(f"{path} is in the legacy TNTIDX format (lazy, cached); write the data again with tools/preprocess_data.py.")
    if not head:
        raise UserError(f"{path} is empty; copy it again, or write the data again with tools/preprocess_data.py.")
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise UserError(f"{path} starts with {head[: len(MAGIC)]!r}, an .idx file starts with {MAGIC!r}; check the prefix.")
    if len(head) < HEADER.size:
        raise UserError(f"{path} is truncated: it has {len(head)} bytes, its header alone needs {HEADER.size}; copy it again.")
    _, version, code, sequence_count, document_entry_count = HEADER.unpack(head)
    if version != VERSION:
        raise UserError(
            f"{path} has version {version}, but version {VERSION} is needed; write the data again with tools/preprocess_data.py."
        )
    if code not in DTYPES:
        known = ", ".join(f"{code} {dtype.name}" for code, dtype in DTYPES.items())
        raise UserError(f"{path} has dtype code {code}, token ids are one of {known}; write the data again with tools/preprocess_data.py.")
    _check_index_bytes(file, HEADER.size + 12 * sequence_count + 8 * document_entry_count)
    return _Header(DTYPES[code], sequence_count, document_entry_count)


def _check_index_bytes(file: DataFile, needed: int) -> None:
    path, found = file.path, file.nbytes
    if found < needed:
        raise UserError(f"{path} is truncated: it has {found} bytes, its header promises {needed}; copy it again.")
    if found > needed:
        raise UserError(
            f"{path} has {found} bytes, its header promises {needed}; an index with more (a multimodal one) is not supported: "
            "write text alone with tools/preprocess_data.py."
        )


def _part(index: DataFile, dtype: str, count: int, offset: int) -> Rows:
    return held_if_small(StoredArray(index, np.dtype(dtype), (count,), offset))
