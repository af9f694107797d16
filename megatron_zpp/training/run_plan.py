"""Plans a run without starting it: memory, bytes and time, for every member of the ZeRO family (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.config.deepspeed import with_deepspeed_json
from megatron_zpp.config.options import options
from megatron_zpp.config.ranks import count_ranks
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.model.flops import forward_flops_of_uses, recomputed_flops_of_uses
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.training.memory_need import MemoryNeed, memory_need
from megatron_zpp.training.sharding import grid_of, sharding_of
from megatron_zpp.zero.plan.time_model import Computation, Job, Machine, StepTime, step_time
from megatron_zpp.zero.plan.traffic import PlannedTraffic, planned_traffic


@dataclass(frozen=True)
class Member:
    """A member of the ZeRO family: its stage, and the features of ZeRO++ that it has."""

    name: str
    stage: int
    has_quantized_weights: bool = False
    has_secondary_weights: bool = False
    has_quantized_gradients: bool = False

    @property
    def features(self) -> int:
        return self.has_quantized_weights + self.has_secondary_weights + self.has_quantized_gradients

    def flags(self, partition_ranks: int) -> str:
        """Flags that ask for this member."""
        words = [f"--zero-stage {self.stage}"]
        words += ["--zero-quantized-weights"] * self.has_quantized_weights
        words += [f"--zero-hpz-partition-size {partition_ranks}"] * self.has_secondary_weights
        words += ["--zero-quantized-gradients"] * self.has_quantized_gradients
        return " ".join(words)


MEMBERS = (
    Member("ZeRO-0", 0),
    Member("ZeRO-1", 1),
    Member("ZeRO-2", 2),
    Member("ZeRO-3", 3),
    Member("+qwZ", 3, has_quantized_weights=True),
    Member("+hpZ", 3, has_secondary_weights=True),
    Member("+qgZ", 3, has_quantized_gradients=True),
    Member("ZeRO++", 3, has_quantized_weights=True, has_secondary_weights=True, has_quantized_gradients=True),
)


@dataclass(frozen=True)
class PlannedWorld:
    """A world of equal nodes, with or without GPUs."""

    nodes: int
    ranks_per_node: int
    is_on_gpu: bool

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class RunPlan:
    """The plan of one member's run. memory: need of each rank. traffic: received by each rank in a step. job: the work of a step."""

    member: Member
    config: Config
    padded_vocab_size: int
    memory: MemoryNeed
    traffic: PlannedTraffic
    job: Job

    @property
    def flags(self) -> str:
        """Flags that ask for this member with the planned partition."""
        return self.member.flags(self.job.grid.partition_ranks)

    @property
    def node_bytes(self) -> int:
        """Bytes that enter one node in a step."""
        return self.job.grid.into_node(self.traffic.total.inter_bytes)

    def time(self, machine: Machine, computation: Computation) -> StepTime:
        return step_time(self.job, machine, computation)


def plan_run(given: Config, member: Member, world: PlannedWorld, padded_vocab_size: int) -> RunPlan:
    """The plan of a run with the flags of `member` and all other flags as given. Raises FlagError if the run would.

    given: a configuration that is not resolved.
    """
    # The stage in the file of --deepspeed_config must not override the member.
    data_ranks = count_ranks(given, world.size, world.ranks_per_node).data
    given = with_deepspeed_json(given, data_ranks).with_values(deepspeed_config=None)
    return _planned(resolve(_as_member(given, member, world), world.size, world.ranks_per_node), member, world, padded_vocab_size)


def plan_as_given(config: Config, world: PlannedWorld, padded_vocab_size: int) -> RunPlan:
    """The plan of a run with this resolved configuration."""
    zero = config.zero
    features = {
        "qwZ": zero.zero_quantized_weights,
        "hpZ": zero.zero_hpz_partition_size > 1,
        "qgZ": zero.zero_quantized_gradients,
    }
    name = " + ".join([f"ZeRO-{zero.zero_stage}", *(feature for feature, is_on in features.items() if is_on)])
    return _planned(config, Member(name, zero.zero_stage, *features.values()), world, padded_vocab_size)


def _planned(config: Config, member: Member, world: PlannedWorld, padded_vocab_size: int) -> RunPlan:
    model, grid, sharding = ModelShape(config.model, padded_vocab_size), grid_of(config, world.size), sharding_of(config)
    microbatches = config.training.global_batch_size // (config.training.micro_batch_size * grid.data_ranks)
    job = Job(model.unit_specs(), model.uses(), sharding, grid, microbatches)
    return RunPlan(
        member,
        config,
        padded_vocab_size,
        memory_need(config, model, sharding, grid, is_on_gpu=world.is_on_gpu),
        planned_traffic(job.unit_specs, job.uses, sharding, grid, microbatches),
        job,
    )


def computation_by_rate(config: Config, padded_vocab_size: int, flops_per_second: float, tensor_ranks: int = 1) -> Computation:
    """Time of one micro-batch, recomputation included, on `tensor_ranks` devices of this speed that share its operations."""
    samples, rate = config.training.micro_batch_size, tensor_ranks * flops_per_second
    forward = forward_flops_of_uses(config.model, padded_vocab_size, samples)
    again = recomputed_flops_of_uses(config.model, padded_vocab_size, samples)
    return Computation(
        tuple(operations / rate for operations in forward),
        tuple((2 * first + repeated) / rate for first, repeated in zip(forward, again, strict=True)),
    )


def computation_by_step(config: Config, padded_vocab_size: int, seconds: float, microbatches: int) -> Computation:
    """Time of one micro-batch of a step, divided among uses in proportion to their operations.

    seconds: time of the whole step if links took no time.
    """
    relative = computation_by_rate(config, padded_vocab_size, 1.0)
    scale = seconds / microbatches / relative.seconds
    return Computation(tuple(scale * part for part in relative.forward), tuple(scale * part for part in relative.backward))


def _as_member(given: Config, member: Member, world: PlannedWorld) -> Config:
    values: Mapping[str, Any] = {
        "zero_stage": member.stage,
        "zero_quantized_weights": member.has_quantized_weights,
        "zero_hpz_partition_size": _partition(given, world) if member.has_secondary_weights else 1,
        "zero_quantized_gradients": member.has_quantized_gradients,
    }
    # Flags with details of a feature are refused without the feature. Here they do not count as given, so that every member accepts them.
    details = {option.name for option in options() if option.group == "zero" and option.flag.needs is not None}
    return replace(given.with_values(**values), given=given.given - details)


def _partition(given: Config, world: PlannedWorld) -> int:
    asked = given.zero.zero_hpz_partition_size
    return asked if asked > 1 else world.ranks_per_node
