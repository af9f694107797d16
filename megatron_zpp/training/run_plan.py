"""Plans a run without starting it: memory, bytes and time, for every member of the ZeRO family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.groups.diloco import DilocoConfig
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.members import MEMBERS, Member, PlannedWorld, config_of
from megatron_zpp.training.memory_need import MemoryNeed, need_of
from megatron_zpp.training.plan.clock import StepTime, step_time
from megatron_zpp.training.plan.machine import Machine
from megatron_zpp.training.plan.outer_plan import OuterPlan, outer_plan
from megatron_zpp.training.plan.planned_step import PlannedStep, plan_step
from megatron_zpp.training.sharding import choose_policy, grid_of, layouts_of, world_size_of
from megatron_zpp.zero.shared_gradients import most_shared_numel, sharing_received_bytes

AS_FAST = 1.05
RATES = (0.01, 10000.0)  # Gbit/s; slower and faster links are not tried


@dataclass(frozen=True)
class RunPlan:
    """The plan of one member's run. grid: of the world, or of one island. step: of one rank; all are alike."""

    member: Member
    config: Config
    padded_vocab_size: int
    grid: Grid
    step: PlannedStep
    is_on_gpu: bool

    @property
    def islands(self) -> int:
        """Copies of the model that train by themselves."""
        return self.config.diloco.diloco_islands

    @property
    def world_size(self) -> int:
        """The number of ranks, of all islands."""
        return world_size_of(self.config, self.grid)

    @property
    def microbatches(self) -> int:
        return self.step.microbatches

    @cached_property
    def memory(self) -> MemoryNeed:
        """The need of each rank."""
        return need_of(self.step, self.config, self.padded_vocab_size, self.grid, is_on_gpu=self.is_on_gpu)

    @property
    def flags(self) -> str:
        """Flags that ask for this member with the planned partition."""
        ladder = self.grid.ladder
        return self.member.flags(ladder.partition_ranks, ladder.ranks_per_node)

    @cached_property
    def weights(self) -> Traffic:
        """What one rank receives of weights in a step."""
        return self.step.traffic(Category.WEIGHTS)

    @cached_property
    def gradients(self) -> Traffic:
        """The same of gradients, with the mean that climbs back in stage 0."""
        return self.step.traffic(Category.GRADIENTS)

    @property
    def node_bytes(self) -> int:
        """Bytes of weights and gradients that enter one node in a step."""
        return self.grid.into_node((self.weights + self.gradients).inter_bytes)

    @property
    def rank_bytes(self) -> int:
        """The same that enter one rank from its own node."""
        return (self.weights + self.gradients).intra_bytes

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes that one rank receives at most in a step from the ranks that share its layers."""
        if self.grid.tensor_ranks == 1:
            return 0
        slices = choose_policy(self.config.zero).in_world(self.grid.ladder).optimizer.slices(self.grid.ladder)
        shared = most_shared_numel(layouts_of(self.config, self.padded_vocab_size, self.grid), slices)
        return self.step.traffic(Category.ACTIVATIONS).tensor_bytes + sharing_received_bytes(shared, self.grid.tensor_ranks)

    @cached_property
    def exchanges(self) -> Traffic:
        """What one rank receives in a step from the ranks that divide its samples."""
        return self.step.traffic(Category.EXCHANGES)

    @property
    def exchanged_node_bytes(self) -> int:
        """Those bytes that enter one node from others."""
        return self.grid.into_node(self.exchanges.context_inter_bytes)

    @cached_property
    def outer(self) -> OuterPlan | None:
        """The outer steps; None without them."""
        return outer_plan(self.config, self.padded_vocab_size, self.grid)

    @property
    def outer_node_bytes(self) -> float:
        """Bytes of outer steps that enter one node from other islands, on average of the iterations of a period."""
        return 0.0 if self.outer is None else self.outer.average_bytes

    @property
    def outer_most_bytes(self) -> int:
        """The same of the iteration with the most."""
        return 0 if self.outer is None else self.outer.most_bytes

    @property
    def mean_node_bytes(self) -> int:
        """The same of an iteration after which islands take means: until --diloco-start-iteration."""
        return 0 if self.outer is None else sum(self.outer.node_bytes)

    def time(self, machine: Machine, *, takes_means: bool = False) -> StepTime:
        """The time of a step on this machine; with outer steps the mean of a period in which islands take no means, or that with means."""
        time = step_time(self.step, self.grid, machine)
        if self.outer is None:
            return time
        outer = self.outer.of_means if takes_means else self.outer
        return outer.added_to(time, machine, self.microbatches)

    def flops_per_second(self, seconds: float) -> float:
        """The rate of a rank if a step takes so long where links take no time, in operations that include repeated ones."""
        return self.step.flops / seconds


def plan_run(given: Config, member: Member, world: PlannedWorld, padded_vocab_size: int) -> RunPlan:
    """The plan of a run with the flags of `member` and all other flags as given. Raises FlagError if the run would.

    given: a configuration that is not resolved.
    """
    return plan_member(config_of(given, member, world), member, world, padded_vocab_size)


def plan_as_given(config: Config, world: PlannedWorld, padded_vocab_size: int) -> RunPlan:
    """The plan of a run with this resolved configuration."""
    zero = config.zero
    quantizes, is_gaussian = zero.zero_quantized_gradients, zero.zero_quantized_gradients_code == "gaussian"
    parts = {
        f"ZeRO-{zero.zero_stage}": True,
        "qwZ": zero.zero_quantized_weights,
        "hpZ": zero.zero_hpz_partition_size > 1,
        "weight differences": zero.zero_quantized_weight_differences,
        "qgZ": quantizes and not is_gaussian,
        "qgZ in Gaussian codes": quantizes and is_gaussian,
        "optimizer on the host": zero.optimizer_cpu_offload,
        "gradients summed inside partitions": zero.zero_gradients_between_microbatches == "secondary",
    }
    member = Member(
        " + ".join(part for part, is_on in parts.items() if is_on),
        zero.zero_stage,
        has_quantized_weights=zero.zero_quantized_weights,
        has_secondary_weights=zero.zero_hpz_partition_size > 1,
        has_quantized_gradients=quantizes,
        has_differences=zero.zero_quantized_weight_differences,
        has_gaussian_gradients=quantizes and is_gaussian,
    )
    return plan_member(config, member, world, padded_vocab_size)


def plan_member(config: Config, member: Member, world: PlannedWorld, padded_vocab_size: int) -> RunPlan:
    """The plan of a member's run with this resolved configuration."""
    grid = grid_of(config, world.size)
    step = plan_step(config, grid, padded_vocab_size, is_on_gpu=world.is_on_gpu)
    return RunPlan(member, config, padded_vocab_size, grid, step, world.is_on_gpu)


def enough_without_islands(
    given: Config, plan: RunPlan, world: PlannedWorld, machine_at: Callable[[float], Machine]
) -> tuple[float, RunPlan] | None:
    """The least rate of the link between nodes at which a run without islands is as fast, in Gbit/s, and the plan of that run.

    That is a run with all other flags as given; if it quantizes nothing, it or lean in the same stage. As fast: a step takes at most
    AS_FAST times as long as one of an island of `plan` would without outer steps at the fastest of RATES. None if no rate is enough.
    given: a configuration that is not resolved. machine_at: with a link of so many Gbit/s.
    """
    needed = step_time(plan.step, plan.grid, machine_at(RATES[1])).seconds
    found = []
    for other in _without_islands(given, plan, world):

        def is_enough(rate: float, other: RunPlan = other) -> bool:
            return other.time(machine_at(rate)).seconds <= AS_FAST * needed

        too_slow, enough = RATES
        if not is_enough(enough):
            continue
        while enough > 1.01 * too_slow:
            middle = math.sqrt(too_slow * enough)
            too_slow, enough = (too_slow, middle) if is_enough(middle) else (middle, enough)
        found.append((enough, other))
    return min(found, key=lambda rate_and_plan: rate_and_plan[0], default=None)


def _without_islands(given: Config, plan: RunPlan, world: PlannedWorld) -> Iterator[RunPlan]:
    """The runs without islands to which `enough_without_islands` compares."""
    given = replace(given, diloco=DilocoConfig(), given=given.given - vars(DilocoConfig()).keys())
    stage, vocabulary = plan.config.zero.zero_stage, plan.padded_vocab_size
    with suppress(FlagError):
        yield plan_as_given(resolve(given, world.size, world.ranks_per_node), world, vocabulary)
    if plan.member.features == plan.member.has_secondary_weights:
        for lean in (member for member in MEMBERS if member.is_lean and member.stage == stage):
            with suppress(FlagError):
                yield plan_run(given, lean, world, vocabulary)
