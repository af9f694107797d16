"""The flags of the training script that describe a tokenizer, for the tools."""

import argparse
import hashlib
from pathlib import Path

from megatron_zpp.config.flag import check_value
from megatron_zpp.config.options import Option, options
from megatron_zpp.config.outside import VOCABULARY_BYTES, OutsideFile
from megatron_zpp.config.schema import CHANGED_TOKENIZERS, DataConfig

NAMES = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_size",
    "legacy_tokenizer",
    "vocab_extra_ids",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tokenizer_special_tokens",
)


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the tokenizer flags with the spellings, choices and defaults of the training. None is required."""
    section = parser.add_argument_group("tokenizer")
    for option in _options():
        allowed = option.flag.allowed
        if option.kind is bool:
            section.add_argument(*option.spellings, dest=option.name, action="store_true", help=option.flag.help)
            continue
        section.add_argument(
            *option.spellings,
            dest=option.name,
            default=option.default,
            type=str if option.kind is tuple else option.kind,
            nargs="+" if option.kind is tuple else None,
            choices=allowed if isinstance(allowed, tuple) else None,
            metavar=None if isinstance(allowed, tuple) else "PATH" if option.flag.unit == "path" else "N" if option.kind is int else "TEXT",
            help=option.flag.help,
        )
    section.add_argument("--trust-remote-code", action="store_true", help="accepted for Megatron's scripts: no code of others runs")


def tokenizer_config(args: argparse.Namespace) -> DataConfig:
    """The flags as a DataConfig. Raises ValueError for a value out of range."""
    values = {option.name: getattr(args, option.name) for option in _options()}
    for option in _options():
        value = values[option.name]
        if option.kind is tuple:
            values[option.name] = tuple(value)
        elif value is not None:
            check_value(option.spelling, value, option.flag.allowed)
    return DataConfig(**values)


def tokenizer_identity(data: DataConfig) -> dict[str, object]:
    """Everything the ids depend on: the flags, and the contents of the files instead of their paths."""
    identity: dict[str, object] = {name: getattr(data, name) for name in NAMES if name != "legacy_tokenizer"}
    if data.tokenizer_type in CHANGED_TOKENIZERS and not data.legacy_tokenizer:
        identity["legacy_tokenizer"] = False  # left out otherwise, as in the journals of runs from before the flag
    identity["tokenizer_special_tokens"] = list(data.tokenizer_special_tokens)
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        if identity[name] is not None:
            identity[name] = _digest(Path(str(identity[name])))
    return identity


def _options() -> list[Option]:
    by_name = {option.name: option for option in options()}
    return [by_name[name] for name in NAMES]


def _digest(path: Path) -> str:
    files = sorted(path.glob("*token*.json")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(OutsideFile(file, str(file), "give the tokenizer's own files.", most_bytes=VOCABULARY_BYTES).content())
    return digest.hexdigest()
