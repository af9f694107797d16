"""Writes the tokenizer of a run as files from which AutoTokenizer of transformers makes one with the same ids for the same text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from megatron_zpp.checkpoint.export import write_json
from megatron_zpp.checkpoint.hf.auto_tokenizer import REBUILT, differing_text, differing_text_of_pieces
from megatron_zpp.checkpoint.hf.rules import Boundaries
from megatron_zpp.checkpoint.hf.tokenizer_content import byte_level_bpe, sentencepiece_bpe
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizers.gpt2 import GPT2BPETokenizer, read_merges, read_vocabulary
from megatron_zpp.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_zpp.data.tokenizers.sentencepiece import AddingTokenizer, PieceTokenizer
from megatron_zpp.data.tokenizers.sentencepiece_model import read_parts, why_no_plain_bpe
from megatron_zpp.data.tokenizers.tokenizer import NullTokenizer, Tokenizer
from megatron_zpp.system.output_file import sync_folder

# With this class transformers 4 and 5 take tokenizer.json as it is; without it, the class of the model's kind would change it.
_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
    "split_special_tokens": False,
    "unk_token": None,
}
# Of the tokenizer_config.json that the run had.
_KEPT = ("model_max_length", "chat_template", "padding_side", "truncation_side", "split_special_tokens")
_PLAIN_NAMES = {"split_special_tokens": True}  # a text that spells a special token is plain text
# With this class in config.json transformers 5 encodes with package sentencepiece; transformers 4 refuses it.
_SENTENCEPIECE_CLASS = {"tokenizer_class": "SentencePieceBackend"}
_MODEL_FILE = "tokenizer.model"
_SUBFOLDER = "tokenizer"
_WHY_SUBFOLDER = f"in the folder {_SUBFOLDER}, because beside config.json AutoTokenizer would give other ids with"


class WrittenTokenizer(NamedTuple):
    """A sentence that says what was written, and the members that config.json needs for it."""

    note: str
    members: dict[str, Any]


@dataclass(frozen=True)
class _Files:
    """What can be written of a tokenizer.

    content: of tokenizer.json; None if there is none, for `reason`. config: members of tokenizer_config.json.
    copies: paths of the run's files, by the names that they get.
    """

    content: Mapping[str, Any] | None
    config: Mapping[str, Any]
    copies: Mapping[str, str]
    reason: str = ""


def boundaries_of(tokenizer: Tokenizer | None) -> Boundaries:
    """The ids for config.json. tokenizer: None if the run had ids."""
    return Boundaries() if tokenizer is None else Boundaries(tokenizer.bos, tokenizer.eod, tokenizer.pad)


def write_tokenizer(folder: Path, data: DataConfig, tokenizer: Tokenizer | None, model_type: str) -> WrittenTokenizer:
    """Writes the tokenizer's files, if AutoTokenizer gives the same ids with them. Else writes tokenizer.model alone, if there is one.

    folder: that of config.json. tokenizer: made of `data`; None if the run had ids. model_type: of config.json.
    """
    if tokenizer is None or isinstance(tokenizer, NullTokenizer):
        return WrittenTokenizer("no tokenizer files: the run had ids for text", {})
    files = _files(data, tokenizer)
    reason = files.reason
    if files.content is not None:
        config = {**_CONFIG, **files.config}
        config |= _names(files.content, boundaries_of(tokenizer), splits_special=config["split_special_tokens"])
        names = f"{', '.join(['tokenizer.json', *files.copies])} and tokenizer_config.json"
        differing = differing_text(files.content, config, model_type, tokenizer)
        if differing is None:
            _write(folder, files.content, config, files.copies)
            return WrittenTokenizer(names, {})
        if model_type in REBUILT:
            differing = differing_text(files.content, config, None, tokenizer)
            if differing is None:
                _write(folder / _SUBFOLDER, files.content, config, files.copies)
                return WrittenTokenizer(f"{names} {_WHY_SUBFOLDER} them", {})
        reason = f"AutoTokenizer would give other ids with a tokenizer.json, for example for {differing[:40]!r}"
    if _MODEL_FILE not in files.copies:
        return WrittenTokenizer(f"no tokenizer files: {reason}", {})
    note = f"{_MODEL_FILE} alone, for the sentencepiece library: {reason}"
    if model_type in REBUILT or differing_text_of_pieces(Path(files.copies[_MODEL_FILE]).read_bytes(), tokenizer) is not None:
        _write(folder / _SUBFOLDER, None, {}, files.copies)
        return WrittenTokenizer(f"{note}; it is {_WHY_SUBFOLDER} it", {})
    _write(folder, None, {}, files.copies)
    return WrittenTokenizer(note, _SENTENCEPIECE_CLASS)


def _write(folder: Path, content: Mapping[str, Any] | None, config: Mapping[str, Any], copies: Mapping[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, path in copies.items():
        shutil.copyfile(path, folder / name)
    if content is not None:
        write_json(folder / "tokenizer.json", dict(content))
        write_json(folder / "tokenizer_config.json", dict(config))
    sync_folder(folder)


def _names(content: Mapping[str, Any], boundaries: Boundaries, *, splits_special: bool) -> dict[str, str | None]:
    """The named tokens of tokenizer_config.json.

    One that is no added token has no name, because its name would make it one. The same holds for one that is not special, where texts that
    spell special tokens are plain text.
    """
    spelling_of = {token["id"]: token["content"] for token in content["added_tokens"] if token["special"] or not splits_special}
    return {name: spelling_of.get(token_id) for name, token_id in boundaries.named().items()}


def _files(data: DataConfig, tokenizer: Tokenizer) -> _Files:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        kept = {name: tokenizer.tokenizer_config[name] for name in _KEPT if tokenizer.tokenizer_config.get(name) is not None}
        content = json.loads(tokenizer.tokenizer_json())
        if content["model"].get("dropout"):
            return _Files(None, {}, {}, "its tokenizer.json leaves out merges at random, so the same text has other ids each time")
        return _Files(content, kept, {})
    if isinstance(tokenizer, GPT2BPETokenizer) and data.vocab_file is not None and data.merge_file is not None:
        copies = {"vocab.json": data.vocab_file, "merges.txt": data.merge_file}
        return _Files(byte_level_bpe(read_vocabulary(data.vocab_file), read_merges(data.merge_file)), _PLAIN_NAMES, copies)
    if isinstance(tokenizer, PieceTokenizer) and data.tokenizer_model is not None:
        content, reason = _sentencepiece_content(data.tokenizer_model, tokenizer)
        return _Files(content, _PLAIN_NAMES, {_MODEL_FILE: data.tokenizer_model}, reason)
    return _Files(None, {}, {}, "transformers reads no .tiktoken file")


def _sentencepiece_content(path: str, tokenizer: PieceTokenizer) -> tuple[dict[str, Any] | None, str]:
    """The content of tokenizer.json, or None and the reason why there is none."""
    if isinstance(tokenizer, AddingTokenizer):
        return None, "SentencePieceTokenizer with --legacy-tokenizer adds pieces that only this program knows"
    model = Path(path).read_bytes()
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    parts = read_parts(model)
    reason = why_no_plain_bpe(parts, pieces)
    return (None, f"it is a {reason}") if reason else (sentencepiece_bpe(parts, pieces, tokenizer.bos), "")
