"""The flags of the training script that describe a tokenizer, for the tools."""

import argparse
import hashlib
from pathlib import Path

from megatron_zpp.config.flag import check_value
from megatron_zpp.config.groups.data import CHANGED_TOKENIZERS, TOKENIZER_FIELDS, TOKENIZER_FILES, TOKENIZER_TYPES
from megatron_zpp.config.obsolete import TOKENIZER_ACCEPTED, TOKENIZER_REFUSED, AcceptedFlag
from megatron_zpp.config.options import Option, options
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.system.outside import VOCABULARY_BYTES, OutsideFile
from megatron_zpp.system.user_error import UserError

# Not in journals of runs from before these flags, so they are recorded only where they change ids.
LATER_NAMES = ("legacy_tokenizer", "tokenizer_hf_no_include_special_tokens", "null_tokenizer_eod_id")
PADDING = AcceptedFlag(1, "a corpus holds ids, the run pads its vocabulary")


def add_recorded_tokenizer(parser: argparse.ArgumentParser, kind: str | None = "NullTokenizer", otherwise: str = "NullTokenizer") -> None:
    """Adds the flags with which a converter says what tokenizer a checkpoint's model was trained with.

    kind: the default of --tokenizer-type. otherwise: the default in words.
    """
    parser.add_argument(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        default=kind,
        help=f"recorded for --use-checkpoint-args (default: {otherwise})",
    )
    parser.add_argument("--tokenizer-model", metavar="PATH", help="recorded for --use-checkpoint-args")


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
    others = parser.add_argument_group("tokenizer flags of Megatron's scripts, without effect or refused")
    for spelling, accepted in {**TOKENIZER_ACCEPTED, "--padded-vocab-size": PADDING}.items():
        nargs = 0 if accepted.num_values == 0 else None
        others.add_argument(
            spelling, action=_Accepted, nargs=nargs, metavar="VALUE", dest="_", default=argparse.SUPPRESS, help=accepted.reason
        )
    for spelling, remedy in TOKENIZER_REFUSED.items():
        others.add_argument(spelling, action=_Refused, nargs="*", dest="_", default=argparse.SUPPRESS, help=f"refused: {remedy}")


class _Accepted(argparse.Action):
    """Prints why the flag has no effect."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None) -> None:
        print(f"accepted, has no effect here: {option} ({self.help})")


class _Refused(argparse.Action):
    """Ends the tool with the remedy."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None) -> None:
        parser.error(f"{option} is not accepted; {TOKENIZER_REFUSED[str(option)]}.")


def tokenizer_config(args: argparse.Namespace) -> DataConfig:
    """The flags as a DataConfig. Raises UserError for a value out of range."""
    values = {option.name: getattr(args, option.name) for option in _options()}
    for option in _options():
        value = values[option.name]
        if option.kind is tuple:
            values[option.name] = tuple(value)
        elif value is not None:
            check_value(option.spelling, value, option.flag.allowed)
    if values["tokenizer_special_tokens"] and values["tokenizer_type"] != "TikTokenizer":
        raise UserError(
            f"--tokenizer-special-tokens {' '.join(values['tokenizer_special_tokens'])} needs --tokenizer-type TikTokenizer; the files of "
            "other tokenizers name their special tokens themselves, so add them there."
        )
    return DataConfig(**values)


def tokenizer_identity(data: DataConfig) -> dict[str, object]:
    """Everything the ids depend on: the flags, and the contents of the files instead of their paths."""
    identity: dict[str, object] = {name: getattr(data, name) for name in TOKENIZER_FIELDS if name not in LATER_NAMES}
    if data.tokenizer_type in CHANGED_TOKENIZERS and not data.legacy_tokenizer:
        identity["legacy_tokenizer"] = False
    if data.tokenizer_hf_no_include_special_tokens:
        identity["tokenizer_hf_no_include_special_tokens"] = True
    if data.null_tokenizer_eod_id is not None:
        identity["null_tokenizer_eod_id"] = data.null_tokenizer_eod_id
    identity["tokenizer_special_tokens"] = list(data.tokenizer_special_tokens)
    for name in TOKENIZER_FILES:
        if identity[name] is not None:
            identity[name] = _digest(Path(str(identity[name])))
    return identity


def _options() -> list[Option]:
    by_name = {option.name: option for option in options()}
    return [by_name[name] for name in TOKENIZER_FIELDS]


def _digest(path: Path) -> str:
    files = sorted(path.glob("*token*.json")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(OutsideFile(file, str(file), "give the tokenizer's own files.", most_bytes=VOCABULARY_BYTES).content())
    return digest.hexdigest()
