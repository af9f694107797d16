"""What AutoTokenizer of transformers makes of a tokenizer's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import sentencepiece
from tokenizers import Tokenizer as Encoder

from megatron_zpp.data.tokenizers.fast_encoder import HARD_TEXTS
from megatron_zpp.data.tokenizers.tokenizer import Tokenizer
from megatron_zpp.data.tokenizers.tokenizer_json import PATTERNS

# transformers 5 takes a tokenizer.json beside a config.json of these kinds for Qwen2's own, whatever tokenizer_config.json says: it keeps
# the tokens, the merges and what is put around a text, and nothing else.
REBUILT = ("qwen2",)
_QWEN2_PARTS = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERNS[1][0]}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
}


def differing_text(content: Mapping[str, Any], config: Mapping[str, Any], model_type: str | None, tokenizer: Tokenizer) -> str | None:
    """A text to which AutoTokenizer gives other ids than `tokenizer`; None if there is none among texts where they are likely to differ.

    The empty text stands for all if AutoTokenizer makes no tokenizer of the files.
    content: of tokenizer.json. config: of tokenizer_config.json, with PreTrainedTokenizerFast as its class, and only added tokens as names;
    with split_special_tokens, only special ones.
    model_type: of the config.json beside them, None if there is none.
    """
    if model_type in REBUILT:
        model = content["model"]
        if model["type"] != "BPE":
            return ""
        content = {**content, **_QWEN2_PARTS, "model": {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"]}}
    try:
        encoder = Encoder.from_str(json.dumps(content))
    except Exception:  # which is what package tokenizers raises, for example for merges that need the affixes that Qwen2's own lacks
        return ""
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = config["split_special_tokens"]
    return _first_differing(lambda text: encoder.encode(text).ids, tokenizer, _texts(encoder, tokenizer))


def differing_text_of_pieces(model: bytes, tokenizer: Tokenizer) -> str | None:
    """As `differing_text`, for a SentencePiece model that its own package encodes.

    AutoTokenizer looks the pieces of a text up by their spellings, also those that the model calls unknown.
    """
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    names = [pieces.id_to_piece(index) for index in range(pieces.get_piece_size())]
    texts = (*HARD_TEXTS, "", *names, *map(_between_others, names))
    return _first_differing(lambda text: [pieces.piece_to_id(piece) for piece in pieces.encode(text, out_type=str)], tokenizer, texts)


def _first_differing(encode: Callable[[str], list[int]], tokenizer: Tokenizer, texts: Iterable[str]) -> str | None:
    return next((text for text in texts if _ids(encode, text) != _ids(tokenizer.tokenize, text)), None)


def _ids(encode: Callable[[str], list[int]], text: str) -> list[int] | None:
    """The ids of a text, None if the tokenizer refuses it, as one without an unknown token may do."""
    try:
        return encode(text)
    except Exception:  # which is what package tokenizers raises
        return None


def _texts(encoder: Encoder, tokenizer: Tokenizer) -> Iterator[str]:
    """Hard texts, every token of the vocabulary as it is spelled and as text, and every added token between others."""
    yield from (*HARD_TEXTS, "")
    vocabulary: dict[str, int] = encoder.get_vocab(with_added_tokens=True)
    for spelling, token_id in vocabulary.items():
        yield from (spelling, tokenizer.detokenize([token_id]))
    for token in encoder.get_added_tokens_decoder().values():
        yield _between_others(token.content)
    yield "".join(vocabulary)


def _between_others(spelling: str) -> str:
    return f"a{spelling}b {spelling} {spelling}{spelling}\n{spelling}"
