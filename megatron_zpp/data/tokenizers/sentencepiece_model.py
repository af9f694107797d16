"""Which SentencePiece models gigatoken can serve: byte-pair encodings that do not change a text, such as Llama 2's and those of
tools/train_tokenizer.py."""

from collections.abc import Iterator

import sentencepiece

from megatron_zpp.data.tokenizers.fast_encoder import NotServed

SPACE = "\u2581"  # a space, as pieces write it
BPE = 2  # TrainerSpec.ModelType
NORMAL = 1  # ModelProto.SentencePiece.Type
NEVER_IN_TEXT = (2, 3, 6)  # unknown, control and byte pieces: a text that spells one is still text


def check_served(model: bytes, pieces: sentencepiece.SentencePieceProcessor) -> list[str]:
    """The spellings of the pieces that no text is encoded to. Raises NotServed, naming the property, if the ids are not proven.

    (The numbers in sentencepiece_model.proto: ModelProto has pieces 1, trainer_spec 2 and normalizer_spec 3; SentencePiece has type 3;
    TrainerSpec has model_type 3 and treat_whitespace_as_suffix 24; NormalizerSpec has precompiled_charsmap 2, remove_extra_whitespaces 4
    and escape_whitespaces 5. The last two are true if they are missing.)
    """
    specs: dict[int, dict[int, int | bytes]] = {2: {}, 3: {}}
    types = []
    for number, value in _fields(model):
        if number in specs and isinstance(value, bytes):
            specs[number].update(_fields(value))
        if number == 1 and isinstance(value, bytes):
            types.append(dict(_fields(value)).get(3, NORMAL))
    trainer, normalizer = specs[2], specs[3]
    if trainer.get(3, 1) != BPE:
        raise NotServed("model that is no byte-pair encoding")
    if normalizer.get(2) or normalizer.get(4, 1) or not normalizer.get(5, 1) or trainer.get(24, 0):
        raise NotServed("model that changes texts")
    if not {*types} <= {NORMAL, *NEVER_IN_TEXT} or types.count(6) != 256:
        raise NotServed("model with pieces of users, or without the 256 bytes")
    spellings = [pieces.id_to_piece(index) for index in range(len(types))]
    merged = [index for index, kind in enumerate(types) if kind == NORMAL and len(spellings[index]) > 1]
    # Of two merges with one score SentencePiece makes the left one first, gigatoken that of its list.
    if len({pieces.get_score(index) for index in merged}) < len(merged):
        raise NotServed("model with equal scores")
    # SentencePiece merges letters that are no pieces, too; gigatoken has taken them for bytes before.
    normal = {spelling for spelling, kind in zip(spellings, types, strict=True) if kind == NORMAL}
    if not set("".join(normal)) <= normal:
        raise NotServed("model with letters that are no pieces")
    never = [spelling for spelling, kind in zip(spellings, types, strict=True) if kind != NORMAL]
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
