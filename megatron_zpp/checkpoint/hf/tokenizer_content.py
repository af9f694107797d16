"""The content of a tokenizer.json for tokenizers that have files of another kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sentencepiece

from megatron_zpp.data.tokenizers.gpt2 import END_OF_TEXT
from megatron_zpp.data.tokenizers.sentencepiece_model import CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED, ModelParts


def byte_level_bpe(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """That of GPT-2's vocab.json and merges.txt."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [_added_token(END_OF_TEXT, vocabulary[END_OF_TEXT], special=True)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(vocabulary), "merges": [list(pair) for pair in merges]},
    }


def sentencepiece_bpe(parts: ModelParts, pieces: sentencepiece.SentencePieceProcessor, begin: int | None) -> dict[str, Any]:
    """That of a plain BPE model (`why_no_plain_bpe`). Text without a piece becomes bytes.

    The higher the score of a piece, the earlier its pairs merge. begin: the id of the piece before every text.
    """
    names = [pieces.id_to_piece(index) for index in range(len(parts.types))]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizers: list[dict[str, Any]] = [spaces]
    if parts.has_space_before:
        normalizers = [{"type": "Prepend", "prepend": SPACE}, spaces]
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": [
            # SentencePiece finds the pieces of users in the text with its own spaces.
            _added_token(names[index], index, special=kind != USER_DEFINED, normalized=kind == USER_DEFINED)
            for index, kind in enumerate(parts.types)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None if begin is None else _beginning(names[begin], begin),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": names[pieces.unk_id()],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {name: index for index, name in enumerate(names)},
            "merges": list(_merges(parts, pieces, names)),
        },
    }


def _merges(parts: ModelParts, pieces: sentencepiece.SentencePieceProcessor, names: list[str]) -> Iterator[list[str]]:
    known = set(names)
    normal = [index for index, kind in enumerate(parts.types) if kind == NORMAL]
    for index in sorted(normal, key=lambda index: -pieces.get_score(index)):
        name = names[index]
        splits = ([name[:cut], name[cut:]] for cut in range(1, len(name)))
        yield from (pair for pair in splits if known.issuperset(pair))


def _beginning(name: str, token_id: int) -> dict[str, Any]:
    """A processor that puts a token before every text."""
    before, first, second = ({"SpecialToken": {"id": name, "type_id": 0}}, *({"Sequence": {"id": part, "type_id": 0}} for part in "AB"))
    return {
        "type": "TemplateProcessing",
        "single": [before, first],
        "pair": [before, first, second],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }


def _added_token(content: str, token_id: int, **switches: bool) -> dict[str, Any]:
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, **switches}
