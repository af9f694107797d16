"""Speeds up SentencePiece BPE several times: a text is cut into segments, and the ids of each segment are computed once and cached.

BPE merges neighbouring symbols, best pair first. If no piece of the model spans two neighbouring characters, nothing merges across them,
and a text cut between them has the same ids. In nearly every model pieces have spaces only at their beginning, so a text can be cut into
words:

    def f(x):\\n    return x   ->   "def" " f(x):" "\\n" "    return" " x"

This holds for BPE models without normalisation, such as Llama 2's and those of tools/train_tokenizer.py. It does not hold for unigram
models, which score a text as a whole.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import sentencepiece

from megatron_zpp.data.tokenizers.token_ids import TokenizedTexts

SPACE = "\u2581"  # a space, as pieces write it
CACHED_SEGMENTS = 1 << 17  # about 40 MB per process
LONGEST_CACHED = 32  # characters; longer segments rarely occur again
BPE = 2  # TrainerSpec.ModelType
# Appended to a serialized model, this sets normalizer_spec.add_dummy_prefix to false: of two equal fields protobuf uses the last.
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SegmentCache(dict[str, bytes]):
    """The ids of segments, as bytes of int32. A missing segment is encoded on first access."""

    def __init__(self, pieces: sentencepiece.SentencePieceProcessor) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, segment: str) -> bytes:
        ids = array("i", self._pieces.encode(segment)).tobytes()
        if len(segment) <= LONGEST_CACHED:
            if len(self) >= CACHED_SEGMENTS:
                self.clear()
            self[segment] = ids
        return ids


class SegmentEncoder:
    """Encodes texts in segments. Made by `segment_encoder`, which checks that the model allows it."""

    def __init__(self, model: bytes, traits: "ModelTraits") -> None:
        self._model = model
        self._traits = traits
        self._cache = SegmentCache(sentencepiece.SentencePieceProcessor(model_proto=model + WITHOUT_DUMMY_PREFIX))
        newline, word = ("\n|", "\n") if traits.splits_at_newlines else ("", "")
        self._segments = re.compile(f"{newline}[ {SPACE}]*[^ {SPACE}{word}]+|[ {SPACE}]+")

    def encode(self, texts: Sequence[str]) -> TokenizedTexts:
        prefix = " " if self._traits.adds_dummy_prefix else ""
        parts = [b"".join(map(self._cache.__getitem__, self._segments.findall(prefix + text if text else ""))) for text in texts]
        ids = np.frombuffer(b"".join(parts), np.int32)
        return TokenizedTexts(ids, np.array([len(part) // 4 for part in parts], dtype=np.int64))

    def __reduce__(self) -> tuple[type["SegmentEncoder"], tuple[bytes, "ModelTraits"]]:
        return SegmentEncoder, (self._model, self._traits)


class ModelTraits(NamedTuple):
    """How a model that can be encoded in segments treats a text."""

    adds_dummy_prefix: bool
    splits_at_newlines: bool


def segment_encoder(pieces: sentencepiece.SentencePieceProcessor) -> SegmentEncoder | None:
    """The encoder by segments for a model; None if its ids could differ from those of the model."""
    model = pieces.serialized_model_proto()
    traits = _traits(model, [pieces.id_to_piece(index) for index in range(pieces.get_piece_size())])
    # Without byte pieces, neighbouring unknown characters become one id, even across segments.
    has_byte_pieces = sum(map(pieces.is_byte, range(pieces.get_piece_size()))) == 256
    return SegmentEncoder(model, traits) if traits and has_byte_pieces else None


def _traits(model: bytes, spellings: Sequence[str]) -> ModelTraits | None:
    specs: dict[int, dict[int, int | bytes]] = {2: {}, 3: {}}
    for number, value in _fields(model):
        if number in specs and isinstance(value, bytes):
            specs[number].update(_fields(value))
    trainer, normalizer = specs[2], specs[3]
    changes_text = bool(normalizer.get(2)) or bool(normalizer.get(4, 1)) or not normalizer.get(5, 1)
    spaces_come_last = bool(trainer.get(24, 0))
    if trainer.get(3, 1) != BPE or changes_text or spaces_come_last:
        return None
    if any(re.search(f"[^{SPACE}]{SPACE}", spelling) for spelling in spellings):
        return None
    return ModelTraits(
        adds_dummy_prefix=bool(normalizer.get(3, 1)),
        splits_at_newlines=not any("\n" in spelling and len(spelling) > 1 for spelling in spellings),
    )


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message.

    (The numbers in sentencepiece_model.proto: ModelProto has trainer_spec 2 and normalizer_spec 3; TrainerSpec has model_type 3 and
    treat_whitespace_as_suffix 24; NormalizerSpec has precompiled_charsmap 2, add_dummy_prefix 3, remove_extra_whitespaces 4 and
    escape_whitespaces 5. The last three are true if they are missing.)
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if kind == 2:
            length, place = _varint(message, place)
        else:
            length = {1: 8, 5: 4}[kind]
        yield key >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """The number at `place`, stored in groups of 7 bits, lowest first, and the place after it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
