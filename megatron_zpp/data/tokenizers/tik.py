"""Megatron's TikTokenizer: the ids of special tokens, then the ranks of a tiktoken file."""

import base64
import binascii
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_zpp.data.tokenizers.byte_pair_encoding import BytePairEncoding
from megatron_zpp.data.tokenizers.file_kinds import RANKED_TOKENS, naming_other_kind
from megatron_zpp.system.outside import VOCABULARY_BYTES, OutsideFile
from megatron_zpp.system.user_error import UserError

# The values of Megatron's --tiktoken-pattern: how a text is cut before bytes are merged.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
FAST_SCHEMES = {"v2": "nemotron"}  # gigatoken's name of a pattern
NEEDED_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
RANK = re.compile(r"[0-9]{1,9}")
JSON_VOCAB_SIZE = 1 << 17  # Megatron's default without --vocab-size: a longer .json file is cut off here


class TikTokenizer(BytePairEncoding):
    """Ids 0 to num_special_tokens - 1 are special tokens; the tokens of the file follow in their order. </s> ends a document.

    model_path: a .json file as Megatron reads it, or a .tiktoken file.
    special_tokens: names of the first ids, by default <unk>, <s> and </s>.
    vocab_size: cuts the file; without it a .tiktoken file is not cut.
    """

    def __init__(
        self, model_path: str, pattern: str, *, num_special_tokens: int, special_tokens: Sequence[str] = (), vocab_size: int | None = None
    ) -> None:
        names = list(special_tokens or NEEDED_SPECIAL_TOKENS)
        _check_special_tokens(names, num_special_tokens)
        tokens = _read_tokens(model_path)
        if vocab_size is None and model_path.endswith(".json"):
            vocab_size = max(JSON_VOCAB_SIZE, num_special_tokens + 256)
        kept = tokens if vocab_size is None else tokens[: max(vocab_size - num_special_tokens, 0)]
        if len(kept) < 256:
            raise UserError(
                f"--vocab-size {vocab_size} leaves no room for 256 bytes after --tiktoken-num-special-tokens {num_special_tokens}; "
                f"give {num_special_tokens + 256} or more."
            )
        names += [f"<SPECIAL_{index}>" for index in range(len(names), num_special_tokens)]
        ids = np.arange(num_special_tokens, num_special_tokens + len(kept), dtype=np.int32)
        ranks = {token: rank for rank, token in enumerate(kept)}
        super().__init__(PATTERNS[pattern], ranks, ids, dict(enumerate(names)), fast_scheme=FAST_SCHEMES.get(pattern))
        self.eod = names.index("</s>")


def _check_special_tokens(names: Sequence[str], num_special_tokens: int) -> None:
    if len(set(names)) < len(names) or not set(NEEDED_SPECIAL_TOKENS) <= set(names):
        raise UserError(
            f"--tokenizer-special-tokens {' '.join(names)} must name {', '.join(NEEDED_SPECIAL_TOKENS)} and nothing twice; change the list."
        )
    if len(names) > num_special_tokens:
        raise UserError(
            f"--tiktoken-num-special-tokens {num_special_tokens} has no room for the {len(names)} special tokens "
            f"{' '.join(names)}; give {len(names)} or more."
        )


def _read_tokens(path: str) -> list[bytes]:
    """The tokens of a file in the order of their ranks; the first 256 are the bytes. Raises UserError for another kind of file."""
    remedy = 'a .tiktoken file has lines of base64 and rank, a .json file a list of objects of "rank", "token_bytes" and "token_str".'
    file = OutsideFile(Path(path), f"--tokenizer-model {path}", remedy, most_bytes=VOCABULARY_BYTES)
    file.check_is_there()
    with naming_other_kind(file, RANKED_TOKENS):
        try:
            tokens = _read_json(file) if path.endswith(".json") else _read_tiktoken(file)
        except TokenError as error:
            file.refuse(f"is not a list of tokens in the order of their ranks ({error})")
    if len(set(tokens)) < len(tokens) or set(tokens[:256]) != {bytes([byte]) for byte in range(256)}:
        raise UserError(f"--tokenizer-model {path} does not begin with the 256 bytes, or has a token twice; copy the file again.")
    return tokens


class TokenError(UserError):
    """An entry is not the token at its place."""


def _read_json(file: OutsideFile) -> list[bytes]:
    return [_token(entry.text("token_bytes"), entry.count("rank"), place) for place, entry in enumerate(file.list_of_members())]


def _read_tiktoken(file: OutsideFile) -> list[bytes]:
    entries = [_entry(line) for line in file.text().splitlines() if line.strip()]
    return [_token(text, rank, place) for place, (rank, text) in enumerate(sorted(entries))]


def _entry(line: str) -> tuple[int, str]:
    words = line.split()
    if len(words) != 2 or not RANK.fullmatch(words[1]):
        raise TokenError(f"it has the line {line[:40]!r}")
    return int(words[1]), words[0]


def _token(text: str, rank: int, place: int) -> bytes:
    if rank != place:
        raise TokenError(f"rank {rank} is at place {place}")
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise TokenError(f"rank {rank} is {text[:40]!r}: {error}") from None
