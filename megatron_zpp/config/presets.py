"""--zeropp: sets of ZeRO++ flags under one name. A flag that a set implies counts as given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_zpp.config.flag import FlagError, in_words, spelling_of
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.schema import Config

PAPER: dict[str, Any] = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
LEAN: dict[str, Any] = {
    "zero_quantized_weight_differences": True,
    "zero_quantized_gradients": True,
    "zero_quantized_gradients_code": "gaussian",
}
LEAN_STAGES = (1, 2, 3)
# Values of flags that a set does not imply and cannot have beside it, and what it has instead.
CONTRADICTED: dict[str, dict[str, tuple[Any, str]]] = {
    "paper": {
        "zero_quantized_weight_differences": (True, "sends quantized weights and keeps no copy across steps"),
        "zero_quantized_gradients_code": ("gaussian", "has the absmax code for gradients"),
    },
    "lean": {"zero_quantized_weights": (True, "sends differences of weights instead")},
}


def with_preset(config: Config, ranks: RankCounts) -> Config:
    """The configuration with the flags that --zeropp implies, and a notice that lists them; the same configuration without --zeropp.

    Raises FlagError for a flag that contradicts the set, naming both.
    """
    name = config.zero.zeropp
    if name is None:
        return config
    values = dict(_values(config, name, ranks))
    for field, value in values.items():
        _check_agreement(config, name, field, value)
    for field, (value, instead) in CONTRADICTED[name].items():
        if config.value_of(field) == value:
            raise FlagError(f"{in_words(field, value)} contradicts --zeropp {name}, which {instead}; leave one of them out.")
    implied = {field: value for field, value in values.items() if field not in config.given}
    flags = " ".join(in_words(field, value) for field, value in implied.items())
    sources = {
        field: f"set by --zeropp {name}" if value is True else f"set to {value} by --zeropp {name}" for field, value in implied.items()
    }
    config = config.with_values(**implied).with_notices(f"--zeropp {name} sets {flags or 'nothing that is not given'}")
    return replace(config, given=config.given | implied.keys(), implied=frozenset(implied), sources={**config.sources, **sources})


def _values(config: Config, name: str, ranks: RankCounts) -> Iterator[tuple[str, Any]]:
    """The flags of the set and their values in a world of these ranks. A partition that is a part of a node stays as it is given."""
    stage = _stage(config, name)
    yield "zero_stage", stage
    yield from (PAPER if name == "paper" else LEAN).items()
    if stage == 3 and config.zero.zero_hpz_partition_size == 1:
        yield "zero_hpz_partition_size", ranks.data_ranks_per_node


def _stage(config: Config, name: str) -> int:
    """The stage of the set; lean takes the given one if it shards the optimizer."""
    stage = config.zero.zero_stage
    if name == "paper" or "zero_stage" not in config.given:
        return 3
    if stage not in LEAN_STAGES:
        raise FlagError(f"--zero-stage {stage} contradicts --zeropp lean, because no state is sharded; choose --zero-stage 1, 2 or 3.")
    return stage


def _check_agreement(config: Config, name: str, field: str, value: Any) -> None:
    """Raises FlagError if the flag is given with another value than the set has."""
    given = config.value_of(field)
    if field not in config.given or given == value:
        return
    words, implied = in_words(field, given), in_words(field, value)
    if given is False:  # a file may say so
        words, implied = f"no {spelling_of(field)}", "it"
    raise FlagError(f"{words} contradicts --zeropp {name}, which sets {implied}; leave one of them out.")
