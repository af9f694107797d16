"""From the flags as given to a complete configuration without contradictions, in phases."""

from __future__ import annotations

from megatron_zpp.config import rules_context, rules_model, rules_run, rules_schedule, rules_tensor, rules_zero
from megatron_zpp.config.batch_schedule import running_schedule
from megatron_zpp.config.deepspeed import naming_sources, with_deepspeed_json
from megatron_zpp.config.defaults import assume, derive
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.options import check_needs, check_values, declared_without_effect
from megatron_zpp.config.presets import with_preset
from megatron_zpp.config.ranks import RankCounts, count_ranks
from megatron_zpp.config.schema import Config


def resolve(config: Config, world_size: int, local_world_size: int | None) -> Config:
    """The configuration of this run in a world of `world_size` ranks, filled in and checked.

    Called once, alike on every rank. local_world_size: ranks that the launcher started on this node, None if it does not say.
    Reads the file of --deepspeed_config first. Raises FlagError for the first rule that is broken.
    """
    ranks = count_ranks(config, world_size, local_world_size)
    config = with_deepspeed_json(config, ranks)
    ranks = ranks.dividing_samples(config.distributed.context_parallel_size)  # which the file may set
    try:
        config = with_preset(config, ranks)
        check_given(config)
        return _filled_in(config, ranks)
    except FlagError as error:
        raise FlagError(naming_sources(str(error), config.sources)) from None


def check_given(config: Config) -> None:
    """Raises FlagError for the first rule that the flags break as they were given, in any world."""
    check_values(config)
    rules_zero.check_given(config)
    rules_run.check_given(config)
    rules_schedule.check_given(config)
    rules_model.check_given(config)
    check_needs(config)  # last, because a flag that does not fit the others should not be told what it needs


def _filled_in(given: Config, ranks: RankCounts) -> Config:
    config = assume(given)
    batches = running_schedule(config, ranks.sample_groups)
    config = derive(config, batches, ranks)
    rules_run.check_resolved(config, ranks.world)
    rules_model.check_resolved(config)
    rules_tensor.check_resolved(config, ranks)
    rules_context.check_resolved(config, ranks)
    rules_schedule.check_resolved(config, batches, ranks.sample_groups)
    rules_zero.check_resolved(config, ranks)
    return config.with_notices(
        *rules_model.surprising_defaults(config),
        *declared_without_effect(config),
        *rules_schedule.surprising_schedules(config, batches),
        *rules_zero.missing_links(config, ranks, given.zero.zero_hpz_partition_size),
        *rules_tensor.needless_division(config),
        *rules_tensor.surprising_costs(config, ranks, batches),
        *rules_context.surprising_costs(config, ranks),
    )
