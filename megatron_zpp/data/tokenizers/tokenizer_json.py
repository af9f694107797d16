"""Which Hugging Face tokenizers gigatoken can serve: those with nothing in their tokenizer.json but what is proven."""

from collections.abc import Mapping
from typing import Any

from megatron_zpp.data.tokenizers.fast_encoder import NotServed
from megatron_zpp.data.tokenizers.gpt2 import BYTES

# How GPT-2, Qwen 2 and 3, Llama 3 and OLMo, GPT-4o, Nemotron 3, Qwen 3.5 and DeepSeek 3 cut a text, as their files write it.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PREFIX, _SPACE = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
PATTERNS: tuple[tuple[str, ...], ...] = (
    (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",),
    (rf"{_CONTRACTIONS}|{_PREFIX}\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACE}",),
    (rf"{_CONTRACTIONS}|{_PREFIX}\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACE}",),
    (
        rf"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}",
    ),
    (rf"{_PREFIX}{_UPPER}*{_LOWER}+|{_PREFIX}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}",),
    (rf"{_CONTRACTIONS}|{_PREFIX}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}",),
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
        "\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
)


def check_served(content: Mapping[str, Any]) -> None:
    """Raises NotServed, naming the property, if the ids of such a tokenizer are not proven. content: as package tokenizers writes it."""
    _check_model(content["model"], {token["content"] for token in content["added_tokens"]})
    _check_added_tokens(content["added_tokens"], content["normalizer"])
    if content["normalizer"] not in (None, {"type": "NFC"}):
        raise NotServed(f"normalizer {content['normalizer'].get('type')}")
    _check_cuts(content["pre_tokenizer"])
    _check_post_processor(content["post_processor"])


def _check_model(model: Mapping[str, Any], added: set[str]) -> None:
    if model["type"] != "BPE":
        raise NotServed(f"model {model['type']}")
    switches = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if used := [name for name in switches if model.get(name)]:
        raise NotServed(f"model with {' and '.join(used)}")
    vocabulary = model["vocab"]
    if not BYTES.keys() <= vocabulary.keys() or not all(BYTES.keys() >= set(token) for token in vocabulary.keys() - added):
        raise NotServed("a vocabulary that is not one of bytes")


def _check_added_tokens(tokens: list[Mapping[str, Any]], normalizer: object) -> None:
    for token in tokens:
        if used := [name for name in ("lstrip", "rstrip", "single_word") if token[name]]:
            raise NotServed(f"added token {token['content']!r} with {' and '.join(used)}")
    # Those that are normalized are found after the others, and in another text.
    normalized = {token["normalized"] for token in tokens}
    if len(normalized) > 1 or (True in normalized and normalizer is not None):
        raise NotServed("added tokens that are normalized")


def _check_cuts(pre_tokenizer: Mapping[str, Any] | None) -> None:
    kind = pre_tokenizer["type"] if pre_tokenizer is not None else "none"
    if pre_tokenizer is not None and _are_bytes(pre_tokenizer, cuts=True):
        return
    if pre_tokenizer is None or kind != "Sequence":
        raise NotServed(f"pre-tokenizer {kind}")
    *splits, last = pre_tokenizer["pretokenizers"]
    patterns = tuple(split["pattern"].get("Regex") for split in splits if split["type"] == "Split")
    isolates = all((split.get("behavior"), split.get("invert")) == ("Isolated", False) for split in splits)
    if patterns not in PATTERNS or len(patterns) < len(splits) or not isolates or not _are_bytes(last, cuts=False):
        raise NotServed("a pre-tokenizer other than those of GPT-2, Qwen, Llama 3, GPT-4o, Nemotron and DeepSeek")


def _are_bytes(pre_tokenizer: Mapping[str, Any], *, cuts: bool) -> bool:
    wanted = ("ByteLevel", False, cuts)
    return tuple(pre_tokenizer.get(name) for name in ("type", "add_prefix_space", "use_regex")) == wanted


def _check_post_processor(processor: Mapping[str, Any] | None) -> None:
    """A processor may put ids around the text, and nothing else."""
    if processor is None or processor["type"] == "ByteLevel":
        return
    if processor["type"] == "Sequence":
        for member in processor["processors"]:
            _check_post_processor(member)
        return
    if processor["type"] != "TemplateProcessing":
        raise NotServed(f"post-processor {processor['type']}")
    if sum("Sequence" in part for part in processor["single"]) != 1:
        raise NotServed("a template that does not hold the text once")
