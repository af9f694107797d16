"""Reads which corpora a run uses, and in what shares, from --data-path and the related flags."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.config.flag import FlagError, spelling_of
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.system.outside import Members, OutsideFile

QUOTES_AND_BLANKS = "'\" \t\n"
SEPARATOR_OF_PARTS = re.compile(r"\s*[,/]\s*|\s+")
SPLITS = ("train", "valid", "test")
SPLIT_FLAGS = {"train": "train_data_path", "valid": "valid_data_path", "test": "test_data_path"}


@dataclass(frozen=True)
class Blend:
    """Prefixes of corpora and their weights as given. Without weights, the share of a corpus is its share of all samples in one epoch."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @property
    def is_plain(self) -> bool:
        """Whether this is one corpus without a weight. Megatron treats one with a weight as a blend of one."""
        return len(self.prefixes) == 1 and self.weights is None


@dataclass(frozen=True)
class DataSources:
    """common: one blend that --split cuts into three, or None. by_split: a blend for each split; a split may have none."""

    common: Blend | None
    by_split: Mapping[str, Blend]

    @property
    def blends(self) -> Mapping[str, Blend]:
        """All blends, each with the name of its split; the common one has the name ""."""
        return self.by_split if self.common is None else {"": self.common}


def read_sources(data: DataConfig) -> DataSources:
    """The blends that the flags name. Reads the files that flags name.

    Raises FlagError for flags that exclude each other and for unusable values.
    """
    given = [name for name in ("data_path", "data_args_path", "per_split_data_args_path") if getattr(data, name)]
    split_given = [name for name in SPLIT_FLAGS.values() if getattr(data, name)]
    if len(given) > 1 or (given and split_given):
        words = " and ".join(spelling_of(name) for name in [*given, *split_given])
        raise FlagError(f"{words} exclude each other; give the corpora in one of these ways.")
    if data.per_split_data_args_path is not None:
        return _by_split(_read_split_file(data.per_split_data_args_path))
    if split_given:
        return _by_split({split: (spelling_of(name), getattr(data, name)) for split, name in SPLIT_FLAGS.items() if getattr(data, name)})
    if data.data_args_path is not None:
        return DataSources(parse_blend("--data-args-path", _read(data.data_args_path, "--data-args-path").split()), {})
    return DataSources(parse_blend("--data-path", data.data_path) if data.data_path else None, {})


def parse_blend(spelling: str, words: Sequence[str]) -> Blend:
    """The blend of `weight prefix weight prefix ...` or of `prefix prefix ...`, which are told apart as in Megatron. ~ is the home folder.

    An even number of words is of the first kind, unless one that should be a weight is not a number. Raises FlagError for no words, for
    weights that are not positive numbers, and for weights that come after their prefixes.
    """
    if not words:
        raise FlagError(f"{spelling} names no corpus; give prefixes, or weights and prefixes in turn.")
    weights = [number_in(word) for word in words[0::2]]
    _refuse_weights_after_prefixes(spelling, words, weights)
    if len(words) % 2 or any(weight is None for weight in weights):
        return Blend(tuple(map(os.path.expanduser, words)), None)
    for word, weight in zip(words[0::2], weights, strict=True):
        if weight is None or not (math.isfinite(weight) and weight > 0):
            raise FlagError(f"{spelling}: a weight must be a positive number, not {word}; leave out a corpus that has no share.")
    if not math.isfinite(sum(weight for weight in weights if weight is not None)):
        raise FlagError(f"{spelling} has weights whose sum is too large for a number; give weights near 1.")
    return Blend(tuple(map(os.path.expanduser, words[1::2])), tuple(weight for weight in weights if weight is not None))


def _refuse_weights_after_prefixes(spelling: str, words: Sequence[str], weights: Sequence[float | None]) -> None:
    """weights: the numbers where weights belong, None for other words."""
    prefixes, numbers = words[0::2], words[1::2]
    if len(words) % 2 or any(weight is not None for weight in weights) or any(number_in(word) is None for word in numbers):
        return
    turned = [word for pair in zip(numbers[:2], prefixes[:2], strict=True) for word in pair] + ["..."] * (len(words) > 4)
    raise FlagError(f"{spelling} has weights after its prefixes; a weight comes before its prefix: {' '.join(turned)}")


def parse_split(split: str) -> tuple[float, float, float]:
    """Three fractions with sum 1 from a --split such as "969, 30, 1". Parts missing at the end are 0.

    "/" and blanks separate parts too, and quotes around them are ignored: scripts pass some on. Raises FlagError, naming --split, unless it
    has one to three non-negative numbers and at least one is positive.
    """
    example = f'give up to three numbers for training, validation and test, for example "969, 30, 1"; found "{split}".'
    try:
        parts = [float(part) for part in SEPARATOR_OF_PARTS.split(split.strip(QUOTES_AND_BLANKS))]
    except ValueError:
        raise FlagError(f"--split is not a list of numbers: {example}") from None
    if len(parts) > 3:
        raise FlagError(f"--split has {len(parts)} parts: {example}")
    if not all(part >= 0 for part in parts) or not 0 < sum(parts) < math.inf:
        raise FlagError(f"--split has a part that is negative, not a number or too large, or none that is positive: {example}")
    total = sum(parts)
    train, valid, test = ([part / total for part in parts] + [0.0, 0.0])[:3]
    return train, valid, test


def number_in(word: str) -> float | None:
    """The number that the word is; None for another word."""
    try:
        return float(word)
    except ValueError:
        return None


def _by_split(words_of: Mapping[str, tuple[str, Sequence[str]]]) -> DataSources:
    if "train" not in words_of:
        given = " and ".join(spelling for spelling, _ in words_of.values())
        raise FlagError(
            f"{given or '--per-split-data-args-path'} leaves training without a corpus; give --train-data-path, or its key train."
        )
    return DataSources(None, {split: parse_blend(spelling, words) for split, (spelling, words) in words_of.items()})


def _read_split_file(path: str) -> dict[str, tuple[str, Sequence[str]]]:
    spelling = "--per-split-data-args-path"
    remedy = f'give a JSON object of lists of words, such as {{"train": ["0.7", "a", "0.3", "b"]}}, with the keys {", ".join(SPLITS)}.'
    file = OutsideFile(Path(path), f"{spelling} {path}", remedy, FlagError)
    file.check_is_there()
    found = file.members(has_unique_keys=True)
    found.require_only(set(SPLITS))
    given = [split for split, words in found.values.items() if words is not None]
    return {split: (f"{spelling} {path} ({split})", words) for split in given if (words := _words(found, split))}


def _words(found: Members, split: str) -> list[str]:
    words = found.list(split)
    if not all(isinstance(word, str | int | float) and not isinstance(word, bool) for word in words):
        found.refuse(split, "a list of words and numbers")
    return [str(word) for word in words]


def _read(path: str, spelling: str) -> str:
    file = OutsideFile(Path(path), f"{spelling} {path}", "give a text file that every rank can read.", FlagError)
    file.check_is_there()
    return file.text()
