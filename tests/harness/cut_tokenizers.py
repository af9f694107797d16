"""Tokenizer files whose ids show where a text was cut: every byte merges with its neighbours, but not across a cut."""

from typing import Any

from megatron_zpp.data.tokenizers.gpt2 import LETTERS
from megatron_zpp.data.tokenizers.tokenizer_json import PATTERNS

ASCII = [ord(letter) for letter in "aA1! \n'\r"]
FIRST_BYTES, NEXT_BYTES = range(0xC2, 0xF5), range(0x80, 0xC0)
ALL_PATTERNS = (None, *PATTERNS)
PARTS = ("normalizer", "pre_tokenizer", "post_processor")
# The neighbours of a character that patterns look at.
PROBE = "a{0}a 1{0}1 !{0}! {0} {0}{0}\n{0}\r\n A{0}A{0}'s{0}  {0}   "


def cut_tokenizer(patterns: tuple[str, ...] | None = None, **changes: Any) -> dict[str, Any]:
    """The content of a tokenizer.json with these patterns, by default GPT-2's own. changes: other members of it, or of its model."""
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": patterns is None}
    splits = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in patterns or ()]
    merges = [(LETTERS[left], LETTERS[right]) for left, right in _neighbours()]
    tokens = [*LETTERS.values(), *("".join(pair) for pair in merges)]
    model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges}
    content = {
        "version": "1.0",
        "added_tokens": [added_token("<|endoftext|>", len(tokens))],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, last]} if splits else last,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**model, **{name: value for name, value in changes.items() if name not in ("added_tokens", *PARTS)}},
    }
    content["added_tokens"] += [added_token(name, len(tokens) + place) for place, name in enumerate(changes.get("added_tokens", ()), 1)]
    return {**content, **{name: changes[name] for name in PARTS if name in changes}}


def added_token(content: str, index: int, **switches: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **plain, **switches}


def _neighbours() -> list[tuple[int, int]]:
    ends = [(left, right) for left in ASCII for right in (*FIRST_BYTES, *ASCII)]
    return [*ends, *((left, right) for left in NEXT_BYTES for right in (*ASCII, *FIRST_BYTES))]
