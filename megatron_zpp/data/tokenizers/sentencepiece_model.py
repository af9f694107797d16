"""Which SentencePiece models other programs can serve: byte-pair encodings that do not change a text, such as Llama 2's and those of
tools/train_tokenizer.py."""

from collections.abc import Iterator
from typing import NamedTuple

import sentencepiece

from megatron_zpp.data.tokenizers.fast_encoder import NotServed

SPACE = "\u2581"  # a space, as pieces write it
BPE = 2  # TrainerSpec.ModelType
# ModelProto.SentencePiece.Type. A text that spells an unknown, control or byte piece is still text.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class ModelParts(NamedTuple):
    """What a SentencePiece model says of itself: fields by their numbers in sentencepiece_model.proto, and the type of each piece.

    trainer: TrainerSpec, with model_type 3 and treat_whitespace_as_suffix 24. normalizer: NormalizerSpec, with precompiled_charsmap 2,
    add_dummy_prefix 3, remove_extra_whitespaces 4 and escape_whitespaces 5; the last three are true if they are missing.
    """

    trainer: dict[int, int | bytes]
    normalizer: dict[int, int | bytes]
    types: list[int | bytes]

    @property
    def has_space_before(self) -> bool:
        """Whether a space is put before every text."""
        return bool(self.normalizer.get(3, 1))


def read_parts(model: bytes) -> ModelParts:
    """The parts of a serialized model. (ModelProto has pieces 1, trainer_spec 2 and normalizer_spec 3; SentencePiece has type 3.)"""
    parts = ModelParts({}, {}, [])
    specs = {2: parts.trainer, 3: parts.normalizer}
    for number, value in _fields(model):
        if number in specs and isinstance(value, bytes):
            specs[number].update(_fields(value))
        if number == 1 and isinstance(value, bytes):
            parts.types.append(dict(_fields(value)).get(3, NORMAL))
    return parts


def why_no_plain_bpe(parts: ModelParts, pieces: sentencepiece.SentencePieceProcessor) -> str | None:
    """Why other programs would merge otherwise than SentencePiece with the pieces in the order of their scores; None if they would not."""
    trainer, normalizer, types = parts
    if trainer.get(3, 1) != BPE:
        return "model that is no byte-pair encoding"
    if normalizer.get(2) or normalizer.get(4, 1) or not normalizer.get(5, 1) or trainer.get(24, 0):
        return "model that changes texts"
    if UNUSED in types or types.count(BYTE) != 256:
        return "model with unused pieces, or without the 256 bytes"
    normal = [pieces.id_to_piece(index) for index, kind in enumerate(types) if kind == NORMAL]
    # Of two merges with one score SentencePiece makes the left one first, other programs that of their list.
    merged = [index for index, kind in enumerate(types) if kind == NORMAL and len(pieces.id_to_piece(index)) > 1]
    if len({pieces.get_score(index) for index in merged}) < len(merged):
        return "model with equal scores"
    # SentencePiece merges letters that are no pieces, too; other programs take them for bytes before.
    if not set("".join(normal)) <= set(normal):
        return "model with letters that are no pieces"
    return None


def check_served(model: bytes, pieces: sentencepiece.SentencePieceProcessor) -> list[str]:
    """The spellings of the pieces that no text is encoded to. Raises NotServed, naming the property, if the ids are not proven."""
    parts = read_parts(model)
    if reason := why_no_plain_bpe(parts, pieces):
        raise NotServed(reason)
    if USER_DEFINED in parts.types:
        raise NotServed("model with pieces of users")
    never = [pieces.id_to_piece(index) for index, kind in enumerate(parts.types) if kind != NORMAL]
    if any(SPACE in spelling for spelling in never):
        raise NotServed("model with spaces in its control pieces")
    return never


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message."""
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
