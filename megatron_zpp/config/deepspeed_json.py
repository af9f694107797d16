"""A DeepSpeed JSON as flags: what it sets counts as given, and messages name file, key and value."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.config.deepspeed_keys import (
    ACCUMULATION_KEY,
    BATCH_KEYS,
    FIELDS,
    GLOBAL_KEY,
    KEYS,
    MICRO_KEY,
    REFUSED,
    SECTIONS,
    WITHOUT_MEANING,
    asks_for_nothing,
)
from megatron_zpp.config.flag import POSITIVE_COUNT, Bounds, FlagError, check_value
from megatron_zpp.config.options import Option, options, spelling_of
from megatron_zpp.config.schema import Config

KIND_IN_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number"}
LARGEST_SCALE_POWER = 126  # 2^127 is the last power of two of fp32, and a loss is multiplied by the scale
OPTIONS: dict[str, Option] = {option.name: option for option in options()}


def with_deepspeed_json(config: Config, world_size: int) -> Config:
    """The configuration with what the file of --deepspeed_config sets, as if the user had given these flags.

    Raises FlagError for a file that cannot be read, a key that is unknown or not available, and a value that contradicts a flag.
    """
    file = config.zero.deepspeed_config
    if file is None:
        return config
    entries = Entries(file, dict(_flattened(file, read_object(file))))
    settings = [*_translated(entries), *_batch(entries, config, world_size)]
    for setting in settings:
        check_agreement(config, setting)
    values = {setting.field: setting.value for setting in settings if setting.value is not None}
    sources = {setting.field: setting.source for setting in settings if setting.field not in config.given}
    config = replace(config, given=config.given | frozenset(values), sources={**config.sources, **sources})
    return config.with_values(**values).with_notices(*_notices(entries, values))


def naming_sources(text: str, sources: Mapping[str, str]) -> str:
    """An error's text, with the source of each flag in it that came from a file."""
    words = set(re.findall(r"--[a-z][\w-]*", text))
    origins = [f"{spelling_of(name)} is {source}" for name, source in sources.items() if spelling_of(name) in words]
    return f"{text.removesuffix('.')} ({', '.join(origins)})." if origins else text


@dataclass(frozen=True)
class Entries:
    """The values of a file by dotted key."""

    file: str
    values: Mapping[str, Any]

    def at(self, key: str) -> str:
        """`key value in file`, as messages say it; the value as JSON."""
        return f"{key} {json.dumps(self.values[key])} in {self.file}"


@dataclass(frozen=True)
class Setting:
    """One field of the schema as a file sets it; a value of None says that the flag must be absent."""

    field: str
    value: Any
    source: str


def read_object(file: str) -> dict[str, Any]:
    """The object in a JSON file. Raises FlagError where it is missing, no JSON, no object, or has a key twice."""
    try:
        with open(file, encoding="utf-8-sig") as stream:
            found = json.load(stream, object_pairs_hook=lambda pairs: _without_doubles(file, pairs))
    except OSError as error:
        raise FlagError(f"--deepspeed_config {file} cannot be read ({error.strerror}); correct the path.") from None
    except UnicodeDecodeError:
        raise FlagError(f"--deepspeed_config {file} is no text in UTF-8; give a JSON file.") from None
    except json.JSONDecodeError as error:
        raise FlagError(f"--deepspeed_config {file} is no JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    if not isinstance(found, dict):
        raise FlagError(f"--deepspeed_config {file} holds no JSON object; it must begin with a brace.")
    return found


def check_agreement(config: Config, setting: Setting) -> None:
    """Nothing, where the flag is not given or says the same."""
    given = config.value_of(setting.field)
    if setting.field not in config.given or given == setting.value:
        return
    words = spelling_of(setting.field) if given is True else f"{spelling_of(setting.field)} {given}"
    raise FlagError(f"{words} contradicts {setting.source}; give one of them, or the same value.")


def _without_doubles(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise FlagError(f"{key} stands twice in one object in {file}; keep one of them.")
        found[key] = value
    return found


def _flattened(file: str, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        if key not in SECTIONS:
            yield _known(file, key), value
        elif isinstance(value, dict):
            for inner, inner_value in value.items():
                yield _known(file, f"{key}.{inner}"), inner_value
        elif value is not None:
            raise FlagError(f"{key} {json.dumps(value)} in {file} is not an object; write {key} with its keys in braces.")


def _known(file: str, key: str) -> str:
    if key in KEYS:
        return key
    section, _, name = key.rpartition(".")
    siblings = [other for other in KEYS if other.rpartition(".")[0] == section] + ([] if section else list(SECTIONS))
    elsewhere = {other.rpartition(".")[2]: other for other in sorted(KEYS)}
    nearest = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    nearest = nearest or [elsewhere[match] for match in difflib.get_close_matches(name, elsewhere, n=1)]
    remedy = f"did you mean {nearest[0]}?" if nearest else "correct or remove it."
    raise FlagError(f"{key} in {file} is not a key of a DeepSpeed configuration; {remedy}")


def _translated(entries: Entries) -> list[Setting]:
    settings = []
    for key, value in entries.values.items():
        if value == "auto" and key not in WITHOUT_MEANING:
            raise FlagError(f"{entries.at(key)} is filled in by another program; write the value, or leave the key out and give the flag.")
        if key in REFUSED and not asks_for_nothing(value, REFUSED[key][0]):
            raise FlagError(f"{entries.at(key)} is not available; {REFUSED[key][1]}.")
        if key in FIELDS and value is not None:
            settings.append(Setting(FIELDS[key], _field_value(entries, key), entries.at(key)))
    return settings


def _field_value(entries: Entries, key: str) -> Any:
    if key == "fp16.initial_scale_power":
        return 2.0 ** _value(entries, key, int, Bounds(at_least=0, at_most=LARGEST_SCALE_POWER))
    if key == "fp16.loss_scale":
        return _value(entries, key, float, Bounds(at_least=0)) or None  # 0 is dynamic
    option = OPTIONS[FIELDS[key]]
    return _value(entries, key, option.kind, option.flag.allowed)


def _value(entries: Entries, key: str, kind: type, allowed: Any) -> Any:
    value = entries.values[key]
    fits = isinstance(value, bool) if kind is bool else isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or (kind is int and value % 1 != 0):
        raise FlagError(f"{entries.at(key)} is not {KIND_IN_WORDS[kind]}; correct it.")
    check_value(f"{key} in {entries.file}:", kind(value), allowed)
    return kind(value)


def _batch(entries: Entries, config: Config, world_size: int) -> list[Setting]:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, where two of the three are known."""
    given = {key: _value(entries, key, int, POSITIVE_COUNT) for key in BATCH_KEYS if entries.values.get(key) is not None}
    if not given:
        return []
    sources = {key: entries.at(key) for key in given}
    for key, field in ((MICRO_KEY, "micro_batch_size"), (GLOBAL_KEY, "global_batch_size")):
        if field in config.given and key in given:
            check_agreement(config, Setting(field, given[key], sources[key]))
        elif field in config.given:
            given[key], sources[key] = config.value_of(field), f"{spelling_of(field)} {config.value_of(field)}"
    source = " with ".join(sources.values())
    micro, steps, total = (given.get(key) for key in (MICRO_KEY, ACCUMULATION_KEY, GLOBAL_KEY))
    if micro is None:
        micro = 1 if total is None else _share(total, steps or 1, world_size, source)
    if total is None:
        total = micro * (steps or 1) * world_size
    if steps is not None and micro * steps * world_size != total:
        raise FlagError(
            f"{source}: micro-batch {micro} x {steps} accumulation steps x {world_size} ranks is {micro * steps * world_size} "
            f"and not the batch of {total}; correct one of them."
        )
    return [Setting("micro_batch_size", micro, source), Setting("global_batch_size", total, source)]


def _share(total: int, steps: int, world_size: int, source: str) -> int:
    if total % (steps * world_size):
        raise FlagError(
            f"{source}: a batch of {total} does not divide into {steps} accumulation steps on {world_size} ranks; "
            f"choose a multiple of {steps * world_size}."
        )
    return total // (steps * world_size)


def _notices(entries: Entries, values: Mapping[str, Any]) -> Iterator[str]:
    flags = [spelling_of(name) if value is True else f"{spelling_of(name)} {value}" for name, value in values.items() if value is not False]
    yield f"{entries.file} sets {' '.join(flags) or 'no flag'}"
    without_meaning = [key.rpartition(".")[2] for key in entries.values if key in WITHOUT_MEANING]
    if without_meaning:
        yield f"{entries.file}: without meaning here, units and lanes take their place: {', '.join(without_meaning)}"
