"""--zeropp: sets of ZeRO++ flags under one name. A flag that a set implies counts as given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_zpp.config.deepspeed import Setting, check_agreement
from megatron_zpp.config.flag import FlagError, in_words
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.schema import Config

PAPER: dict[str, Any] = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
LEAN: dict[str, Any] = {
    "zero_quantized_weight_differences": True,
    "zero_quantized_gradients": True,
    "zero_quantized_gradients_code": "gaussian",
}
CONTRADICTED = {"lean": "zero_quantized_weights", "paper": "zero_quantized_weight_differences"}
LEAN_STAGES = (1, 2, 3)


def with_preset(config: Config, ranks: RankCounts) -> Config:
    """The configuration with the flags that --zeropp implies, and a notice that lists them; the same configuration without --zeropp.

    Raises FlagError for a flag that contradicts the set, naming both.
    """
    name = config.zero.zeropp
    if name is None:
        return config
    settings = [Setting(field, value, f"--zeropp {name}") for field, value in _values(config, name, ranks)]
    for setting in settings:
        check_agreement(config, setting)
    contradicted = CONTRADICTED[name]
    if config.value_of(contradicted):
        raise FlagError(
            f"{in_words(contradicted, True)} contradicts --zeropp {name}, which codes weights in another way; give one of them."
        )
    implied = {setting.field: setting.value for setting in settings if setting.field not in config.given}
    flags = " ".join(in_words(field, value) for field, value in implied.items())
    config = replace(config, given=config.given | frozenset(implied)).with_values(**implied)
    return config.with_notices(f"--zeropp {name} sets {flags or 'nothing that is not given'}")


def _values(config: Config, name: str, ranks: RankCounts) -> Iterator[tuple[str, Any]]:
    stage = _stage(config, name)
    yield "zero_stage", stage
    yield from (PAPER if name == "paper" else LEAN).items()
    if stage == 3 and "zero_hpz_partition_size" not in config.given:
        yield "zero_hpz_partition_size", ranks.data_ranks_per_node


def _stage(config: Config, name: str) -> int:
    """The stage of the set; lean takes the given one if it shards the optimizer."""
    stage = config.zero.zero_stage
    if name == "paper" or "zero_stage" not in config.given:
        return 3
    if stage not in LEAN_STAGES:
        raise FlagError(f"--zero-stage {stage} contradicts --zeropp lean, because no state is sharded; choose --zero-stage 1, 2 or 3.")
    return stage
