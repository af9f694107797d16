"""Writes the tokenizer of a run as files for Hugging Face's classes, which then give the same ids for the same text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import sentencepiece

from megatron_zpp.checkpoint.export import write_json
from megatron_zpp.config.schema import DataConfig

FILES_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
MARK = "\u2581"  # a space, as pieces write it
_PROBE = "  a\u00a0 \ufb01 \u2460A  b "  # spaces, a ligature and characters that normalization would change
_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def write_tokenizer(folder: Path, data: DataConfig) -> str:
    """Writes the tokenizer files into `folder`, if the kind of tokenizer allows it. Returns a sentence that says what was written."""
    if data.tokenizer_type in ("HuggingFaceTokenizer", "HFTokenizer") and data.tokenizer_model is not None:
        return _copy_huggingface(folder, Path(data.tokenizer_model))
    if data.tokenizer_type == "GPT2BPETokenizer" and data.vocab_file is not None and data.merge_file is not None:
        return _copy_gpt2(folder, data.vocab_file, data.merge_file)
    if data.tokenizer_type in ("NullTokenizer", None) or data.tokenizer_model is None:
        return "no tokenizer files: the run had ids for text"
    if data.tokenizer_type == "TikTokenizer":
        return "no tokenizer files: transformers reads no .tiktoken file"
    return _write_sentencepiece(folder, data, data.tokenizer_model)


def _copy_huggingface(folder: Path, model_path: Path) -> str:
    source = model_path if model_path.is_dir() else model_path.parent
    shutil.copyfile(source / "tokenizer.json" if model_path.is_dir() else model_path, folder / "tokenizer.json")
    beside = [name for name in FILES_BESIDE if (source / name).is_file()]
    for name in beside:
        shutil.copyfile(source / name, folder / name)
    return f"copies of {', '.join(['tokenizer.json', *beside])}"


def _copy_gpt2(folder: Path, vocab_file: str, merge_file: str) -> str:
    shutil.copyfile(vocab_file, folder / "vocab.json")
    shutil.copyfile(merge_file, folder / "merges.txt")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    return "vocab.json, merges.txt and tokenizer_config.json"


def _write_sentencepiece(folder: Path, data: DataConfig, model_path: str) -> str:
    """Copies the SentencePiece model, and writes a tokenizer.json if one can give the same ids."""
    shutil.copyfile(model_path, folder / "tokenizer.model")
    if data.legacy_tokenizer and data.tokenizer_type == "Llama2Tokenizer":
        return "tokenizer.model alone, for the sentencepiece library: the training put its begin-of-sentence piece before every text"
    if data.legacy_tokenizer and data.tokenizer_type == "SentencePieceTokenizer":
        return "tokenizer.model alone: SentencePieceTokenizer with --legacy-tokenizer adds pieces that only this program knows"
    pieces = sentencepiece.SentencePieceProcessor(model_proto=(folder / "tokenizer.model").read_bytes())
    if not _is_plain_bpe(pieces):
        return "tokenizer.model alone, for the sentencepiece library: it is not a BPE model of text as it is"
    write_json(folder / "tokenizer.json", bpe_json(pieces))
    end = pieces.id_to_piece(pieces.eos_id())
    write_json(folder / "tokenizer_config.json", {**_TOKENIZER_CONFIG, "bos_token": end, "eos_token": end})
    return "tokenizer.json, tokenizer_config.json and tokenizer.model"


def bpe_json(pieces: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """The tokenizer.json of a BPE model without normalization. Text without a piece becomes bytes.

    The higher the score of a piece, the earlier its pairs merge.
    """
    names = [pieces.id_to_piece(index) for index in range(pieces.get_piece_size())]
    vocab = {name: index for index, name in enumerate(names)}
    merges = []
    for index in sorted(_mergeable(pieces), key=lambda index: -pieces.get_score(index)):
        name = names[index]
        splits = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
        merges += [[left, right] for left, right in splits if left in vocab and right in vocab]
    special = [index for index in range(len(names)) if pieces.is_control(index) or pieces.is_unknown(index)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": names[index], **flags} for index in special],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": names[pieces.unk_id()],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _mergeable(pieces: sentencepiece.SentencePieceProcessor) -> list[int]:
    ids = range(pieces.get_piece_size())
    return [
        index
        for index in ids
        if not (pieces.is_control(index) or pieces.is_unknown(index) or pieces.is_byte(index) or pieces.is_unused(index))
        and len(pieces.id_to_piece(index)) > 1
    ]


def _is_plain_bpe(pieces: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether the model does not normalize text, encodes unknown characters as bytes, and has the ranks of merges as scores."""
    scores = [pieces.get_score(index) for index in _mergeable(pieces)]
    has_bytes = any(pieces.is_byte(index) for index in range(pieces.get_piece_size()))
    is_unchanged = pieces.normalize(_PROBE) == _PROBE.replace(" ", MARK)
    return has_bytes and is_unchanged and all(score <= 0 and score == round(score) for score in scores)
