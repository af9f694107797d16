"""Finds which tokenizer reads a file that was given to another one, for the error about it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_zpp.system.outside import OutsideFile

SENTENCEPIECE, TOKENIZER_JSON, VOCABULARY, MERGES = "a SentencePiece model", "a tokenizer.json", "a vocab.json", "a merges.txt"
RANKED_TOKENS, SETTINGS = "a list of ranked tokens", "a file of settings"
POINTER, WEB_PAGE = "a pointer of Git LFS", "a web page"
REMEDIES = {
    SENTENCEPIECE: "give --tokenizer-type SentencePieceTokenizer --tokenizer-model {path}",
    TOKENIZER_JSON: "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model {path}",
    VOCABULARY: "give --tokenizer-type GPT2BPETokenizer --vocab-file {path}, and --merge-file",
    MERGES: "give --tokenizer-type GPT2BPETokenizer --merge-file {path}, and --vocab-file",
    RANKED_TOKENS: "give --tokenizer-type TikTokenizer --tokenizer-model {path}",
    SETTINGS: "give the tokenizer.json or the SentencePiece model that it belongs to",
    POINTER: "fetch the file itself, with git lfs pull",
    WEB_PAGE: "download the file itself",
}
NAMES_IN_FOLDERS = {"tokenizer.json": TOKENIZER_JSON, "tokenizer.model": SENTENCEPIECE, "vocab.json": VOCABULARY}
RANKED_LINE = re.compile(r"[A-Za-z0-9+/]+=* [0-9]+")
MERGED_LINE = re.compile(r"\S+ \S+")


@contextmanager
def naming_other_kind(file: OutsideFile, own: str) -> Iterator[None]:
    """Where the block refuses the file with a UserError, and another tokenizer reads it, the error names that one instead.

    own: the kind of file that the block reads.
    """
    try:
        yield
    except ValueError:
        if file.path.is_dir():
            for name, kind in NAMES_IN_FOLDERS.items():
                if (file.path / name).is_file():
                    _with_remedy(file, kind, file.path / name).refuse(f"is a folder with {kind}")
        elif not file.is_missing():
            found = kind_of(file.content())
            if found is not None and found != own:
                _with_remedy(file, found, file.path).refuse(f"is {found}")
        raise


def kind_of(content: bytes) -> str | None:
    """What a file holds, one of REMEDIES; None if it is none of them."""
    if content.startswith(b"version https://git-lfs"):
        return POINTER
    if content[:100].lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return WEB_PAGE
    if content[:1] == content[2:3] == b"\n":  # in a SentencePiece model, field 1 of the first message is a message whose field 1 is a piece
        return SENTENCEPIECE
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    try:
        return _kind_of_json(json.loads(text))
    except (ValueError, RecursionError):
        return _kind_of_lines(text.splitlines()[:100])


def _kind_of_json(found: Any) -> str | None:
    if isinstance(found, list):
        return RANKED_TOKENS if found and isinstance(found[0], dict) and {"rank", "token_bytes"} <= found[0].keys() else None
    if not isinstance(found, dict) or not found:
        return None
    if all(type(value) is int for value in found.values()):
        return VOCABULARY
    if isinstance(found.get("model"), dict):
        return TOKENIZER_JSON
    return SETTINGS if {"tokenizer_class", "added_tokens_decoder", "model_type", "architectures"} & found.keys() else None


def _kind_of_lines(lines: list[str]) -> str | None:
    if lines and all(map(RANKED_LINE.fullmatch, lines)):
        return RANKED_TOKENS
    merges = lines[1:] if lines and lines[0].startswith("#version") else lines
    return MERGES if merges and all(map(MERGED_LINE.fullmatch, merges)) else None


def _with_remedy(file: OutsideFile, kind: str, path: Path) -> OutsideFile:
    """The file with what to do about it. path: of the file of this kind."""
    return replace(file, remedy=f"{REMEDIES[kind].format(path=path)}.")
