"""From the flags as given to a complete configuration without contradictions, in phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_zpp.config import rules_context, rules_diloco, rules_model, rules_run, rules_schedule, rules_tensor, rules_zero
from megatron_zpp.config.batch_schedule import running_schedule
from megatron_zpp.config.deepspeed import NOTHING, with_deepspeed_json
from megatron_zpp.config.defaults import assume, derive
from megatron_zpp.config.flag import FlagError, naming_sources
from megatron_zpp.config.options import check_needs, check_values, declared_without_effect
from megatron_zpp.config.presets import with_preset
from megatron_zpp.config.ranks import RankCounts, count_ranks
from megatron_zpp.config.schema import Config
from megatron_zpp.config.wrong_size import Proposal, WrongSize

# World size and local world size, as for `resolve`, with values of fields in place of what flags and files say.
WorldOf = Callable[[Mapping[str, Any]], tuple[int, int | None]]


def resolve(config: Config, world_size: int, local_world_size: int | None) -> Config:
    """The configuration of this run in a world of `world_size` ranks, filled in and checked.

    Called once, alike on every rank. local_world_size: ranks that the launcher started on this node, None if it does not say.
    Reads the file of --deepspeed_config first. Raises FlagError for the first rule that is broken. A number of ranks that its remedy names
    breaks no other rule, unless the remedy says so.
    """
    return resolve_in(config, lambda _: (world_size, local_world_size))


def resolve_in(config: Config, world_of: WorldOf) -> Config:
    """As `resolve`, in a world whose size may follow the numbers of ranks that share layers or samples."""
    try:
        return _resolved(config, *world_of(NOTHING))
    except WrongSize as error:
        raise FlagError(_proposing_what_fits(error, config, world_of)) from None


def could_have(config: Config, world_size: int, **sizes: int) -> bool:
    """Whether a resolved configuration breaks no rule with these numbers of ranks instead, in the same world.

    The rule about the vocabulary is not tried, because the tokenizer decides its size.
    """
    try:
        _resolved(_as_given(config), world_size, config.distributed.ranks_per_node, sizes)
    except FlagError:
        return False
    return True


def _as_given(config: Config) -> Config:
    """The configuration before it was resolved: without what was filled in, or set by --zeropp."""
    given = config.given - config.implied
    return Config(given=given).with_values(**{name: config.value_of(name) for name in given})


def _proposing_what_fits(error: WrongSize, given: Config, world_of: WorldOf) -> str:
    """The text of the error, whose remedy leaves out numbers of ranks that break other rules.

    If the padding of the vocabulary leaves no number of tensor ranks but 1, the remedy names a wider padding.
    """
    proposal = _without_other_errors(error.proposal, given, world_of)
    if proposal.field == "tensor_model_parallel_size" and list(proposal.sizes) == [1] and given.model.padded_vocab_size is None:
        padding = given.model.make_vocab_size_divisible_by
        for_all = given.with_values(make_vocab_size_divisible_by=math.lcm(padding, proposal.size, *error.proposal.sizes))
        wider = _without_other_errors(error.proposal, for_all, world_of)
        if len(wider.sizes) > 1:
            multiple = math.lcm(padding, *wider.sizes, *([wider.size] if wider.start else []))
            proposal = replace(wider, also=f"{wider.also} with --make-vocab-size-divisible-by {multiple}")
    return error.finish(str(proposal))


def _without_other_errors(proposal: Proposal, given: Config, world_of: WorldOf) -> Proposal:
    """The proposal without numbers of ranks that break other rules."""

    def next_error(size: int, more: int) -> str:
        values = {proposal.field: size}
        world_size, local_world_size = world_of(values)
        ranks_per_node = given.distributed.ranks_per_node or local_world_size
        if ranks_per_node is not None:
            values["ranks_per_node"] = more * ranks_per_node
        try:
            model = _resolved(given, more * world_size, more, values).model
            if proposal.field == "tensor_model_parallel_size":
                rules_tensor.check_vocabulary(model, rules_tensor.known_rows(model), size)
        except FlagError as next_one:
            return str(next_one)
        return ""

    return proposal.without_other_errors(next_error)


def _resolved(given: Config, world_size: int, local_world_size: int | None, values: Mapping[str, Any] = NOTHING) -> Config:
    """As `resolve`, with `values` in place of what flags and files say."""
    given = given.with_values(**values)
    config = given
    try:
        ranks = count_ranks(given, world_size, local_world_size)
        config = with_deepspeed_json(given, ranks, values)
        ranks = ranks.dividing_samples(config.distributed.context_parallel_size)  # which the file may set
        config = with_preset(config, ranks)
        check_given(config)
        return _filled_in(config, ranks)
    except FlagError as error:
        raise error.finished_by(partial(naming_sources, sources=config.sources)) from None


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
    rules_tensor.check_resolved(config)
    rules_context.check_resolved(config)
    rules_schedule.check_resolved(config, batches, ranks.sample_groups)
    rules_zero.check_resolved(config, ranks)
    rules_diloco.check_resolved(config, ranks)
    return config.with_notices(
        *rules_model.surprising_defaults(config),
        *declared_without_effect(config),
        *rules_schedule.surprising_schedules(config),
        *rules_zero.missing_links(config, ranks, given.zero.zero_hpz_partition_size),
        *rules_diloco.surprising_lengths(config, batches),
        *rules_tensor.needless_division(config),
        *rules_tensor.surprising_costs(config, ranks.of_island, batches),
        *rules_context.surprising_costs(config, ranks),
    )
