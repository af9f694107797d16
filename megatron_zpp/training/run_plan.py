"""Plans a run without starting it: memory, bytes and time, for every member of the ZeRO family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.members import Member, PlannedWorld, config_of
from megatron_zpp.training.memory_need import MemoryNeed, need_of
from megatron_zpp.training.plan.clock import StepTime, step_time
from megatron_zpp.training.plan.machine import Machine
from megatron_zpp.training.plan.planned_step import PlannedStep, plan_step
from megatron_zpp.training.sharding import choose_policy, grid_of, layouts_of
from megatron_zpp.zero.shared_gradients import most_shared_numel, sharing_received_bytes


@dataclass(frozen=True)
class RunPlan:
    """The plan of one member's run. step: of one rank; all are alike."""

    member: Member
    config: Config
    padded_vocab_size: int
    grid: Grid
    step: PlannedStep
    is_on_gpu: bool

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

    def time(self, machine: Machine) -> StepTime:
        """The time of a step on this machine."""
        return step_time(self.step, self.grid, machine)

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
