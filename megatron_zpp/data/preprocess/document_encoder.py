"""Turns JSON lines into token ids, one batch of lines at a time."""

import json
import sys
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_zpp.data.indexed_dataset import best_dtype
from megatron_zpp.data.tokenizers.token_ids import TokenizedTexts
from megatron_zpp.data.tokenizers.tokenizer import Tokenizer
from megatron_zpp.system.user_error import UserError


class BadLine(NamedTuple):
    """A line that is not a document."""

    place: int  # index among the lines of its batch
    reason: str


class Documents(NamedTuple):
    """Documents of one key. A document is one sequence, or none if it is empty."""

    tokens: np.ndarray  # [sum of lengths] in the stored dtype
    lengths: np.ndarray  # [sequences] int64
    ends: np.ndarray  # [documents] int64: number of sequences before each document's end


class EncodedBatch(NamedTuple):
    """The result of encoding a batch of lines. Every line that is neither blank nor bad is one document of each key."""

    documents: dict[str, Documents]
    bad_lines: list[BadLine]
    line_count: int
    text_bytes: int


class Record(NamedTuple):
    """The texts of one line by key."""

    place: int
    texts: dict[str, str]


@dataclass(frozen=True)
class DocumentEncoder:
    """Encodes lines, each a JSON object with a string under every key, to one document per key. A bad line gives no documents."""

    keys: tuple[str, ...]
    tokenizer: Tokenizer
    append_eod: bool

    def encode(self, text: bytes) -> EncodedBatch:
        lines = text.split(b"\n")
        if not lines[-1]:
            lines.pop()
        records, bad_lines = self._read(lines)
        try:
            documents = self._tokenize(records)
        except ValueError:
            # Some text cannot be tokenized. Tokenize one by one to find out which.
            refused = [BadLine(record.place, reason) for record in records if (reason := self._tokenizing_error(record))]
            places = {line.place for line in refused}
            documents = self._tokenize([record for record in records if record.place not in places])
            bad_lines = sorted(bad_lines + refused)
        return EncodedBatch(documents, bad_lines, len(lines), len(text))

    def _read(self, lines: Sequence[bytes]) -> tuple[list[Record], list[BadLine]]:
        records, bad_lines = [], []
        for place, line in enumerate(lines):
            if not line or line.isspace():
                continue
            try:
                records.append(Record(place, read_texts(line, self.keys)))
            except (ValueError, RecursionError) as error:
                bad_lines.append(BadLine(place, str(error)))
        return records, bad_lines

    def _tokenize(self, records: Sequence[Record]) -> dict[str, Documents]:
        return {key: self._documents(self.tokenizer.tokenize_batch([record.texts[key] for record in records])) for key in self.keys}

    def _tokenizing_error(self, record: Record) -> str:
        try:
            self._tokenize([record])
        except ValueError as error:
            return str(error) or type(error).__name__
        return ""

    def _documents(self, texts: TokenizedTexts) -> Documents:
        ids, lengths = texts
        vocab_size = self.tokenizer.vocab_size
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            wrong = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
            raise UserError(f"token id {wrong} is outside of the vocabulary of {vocab_size} ids")
        is_filled = lengths > 0
        if self.append_eod:
            ids = np.insert(ids, np.cumsum(lengths)[is_filled], self.tokenizer.eod)
            lengths = lengths + is_filled
        return Documents(ids.astype(best_dtype(vocab_size), copy=False), lengths[is_filled], np.cumsum(is_filled, dtype=np.int64))


def read_texts(line: bytes, keys: Sequence[str]) -> dict[str, str]:
    """The strings under the keys of one JSON object. Raises UserError that says what is wrong with the line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"not valid UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        if line.startswith(BOM_UTF8):
            raise UserError("begins with a byte order mark, which JSON does not have; save the file as UTF-8 without it") from None
        raise UserError(f'not JSON ({error}); every line needs one object, such as {{"text": "..."}}') from None
    except ValueError:  # json has no error of its own for it
        raise UserError(f"holds a whole number of more than {sys.get_int_max_str_digits()} digits; write it as a string") from None
    if not isinstance(record, dict):
        raise UserError(f"holds {type(record).__name__}, but a JSON object is needed")
    return {key: _read_text(record, key) for key in keys}


def _read_text(record: dict[str, object], key: str) -> str:
    if key not in record:
        raise UserError(f'key "{key}" is missing (found: {", ".join(record) or "none"}); --json-keys names the keys to read')
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f'key "{key}" holds {type(text).__name__}, but a string is needed')
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f'key "{key}" holds half of a surrogate pair, which is not text') from None
    return text
