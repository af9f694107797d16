"""The members of the ZeRO family and their flags. torch is not imported, so mistakes in flags are found before it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.config.deepspeed import with_deepspeed_json
from megatron_zpp.config.options import options
from megatron_zpp.config.ranks import RankCounts, count_ranks
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.rules_zero import ABSMAX_BITS, GAUSSIAN_BITS, GAUSSIAN_INTRA_BITS
from megatron_zpp.config.schema import Config


@dataclass(frozen=True)
class Member:
    """A member of the ZeRO family: its stage, and the features of ZeRO++ that it has.

    has_differences: whether differences of weights cross between partitions. has_gaussian_gradients: in place of integers, there. Together
    they are --zeropp lean.
    """

    name: str
    stage: int
    has_quantized_weights: bool = False
    has_secondary_weights: bool = False
    has_quantized_gradients: bool = False
    has_differences: bool = False
    has_gaussian_gradients: bool = False

    @property
    def features(self) -> int:
        weights = self.has_quantized_weights + self.has_secondary_weights + self.has_differences
        return weights + self.has_quantized_gradients + self.has_gaussian_gradients

    @property
    def is_lean(self) -> bool:
        """Whether --zeropp lean asks for this member."""
        return self.has_differences and self.has_gaussian_gradients

    def flags(self, partition_ranks: int, ranks_per_node: int) -> str:
        """Flags that ask for this member. ranks_per_node: the partition that --zeropp has by itself."""
        if self.is_lean:
            words = ["--zeropp lean"] + [f"--zero-stage {self.stage}"] * (self.stage != 3)
            if self.has_secondary_weights and partition_ranks != ranks_per_node:
                words.append(f"--zero-hpz-partition-size {partition_ranks}")
            return " ".join(words)
        words = [f"--zero-stage {self.stage}"]
        words += ["--zero-quantized-weights"] * self.has_quantized_weights
        words += ["--zero-quantized-weight-differences"] * self.has_differences
        words += [f"--zero-hpz-partition-size {partition_ranks}"] * (self.has_secondary_weights and partition_ranks > 1)
        words += ["--zero-quantized-gradients"] * self.has_quantized_gradients
        words += ["--zero-quantized-gradients-code gaussian"] * self.has_gaussian_gradients
        return " ".join(words)


LEAN = "lean"
# Bits of gradients that each code has, between partitions and inside them.
INTER_BITS: dict[str, tuple[int, ...]] = {"absmax": ABSMAX_BITS, "gaussian": GAUSSIAN_BITS}
INTRA_BITS: dict[str, tuple[int, ...]] = {"absmax": ABSMAX_BITS, "gaussian": (GAUSSIAN_INTRA_BITS,)}
MEMBERS = (
    Member("ZeRO-0", 0),
    Member("ZeRO-1", 1),
    Member("ZeRO-2", 2),
    Member("ZeRO-3", 3),
    Member("+qwZ", 3, has_quantized_weights=True),
    Member("+hpZ", 3, has_secondary_weights=True),
    Member("+qgZ", 3, has_quantized_gradients=True),
    Member("ZeRO++", 3, has_quantized_weights=True, has_secondary_weights=True, has_quantized_gradients=True),
    Member("lean-1", 1, has_quantized_gradients=True, has_differences=True, has_gaussian_gradients=True),
    Member("lean-2", 2, has_quantized_gradients=True, has_differences=True, has_gaussian_gradients=True),
    Member(LEAN, 3, has_secondary_weights=True, has_quantized_gradients=True, has_differences=True, has_gaussian_gradients=True),
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


def config_of(given: Config, member: Member, world: PlannedWorld) -> Config:
    """The resolved configuration of a run with the flags of `member` and all other flags as given. Raises FlagError if the run would.

    given: a configuration that is not resolved.
    """
    ranks = count_ranks(given, world.size, world.ranks_per_node)
    # The stage in the file of --deepspeed_config must not override the member.
    given = with_deepspeed_json(given, ranks).with_values(deepspeed_config=None)
    return resolve(_as_member(given, member, ranks), world.size, world.ranks_per_node)


def _as_member(given: Config, member: Member, ranks: RankCounts) -> Config:
    zero = given.zero
    code = "gaussian" if member.has_gaussian_gradients else "absmax"
    inter_bits, intra_bits = zero.zero_quantized_gradients_inter_bits, zero.zero_quantized_gradients_intra_bits
    values: dict[str, Any] = {
        "zeropp": LEAN if member.is_lean else None,
        "zero_stage": member.stage,
        "zero_quantized_weights": member.has_quantized_weights,
        "zero_quantized_weight_differences": member.has_differences,
        "zero_hpz_partition_size": _partition(given, ranks) if member.has_secondary_weights else 1,
        "zero_quantized_gradients": member.has_quantized_gradients,
        "zero_quantized_gradients_code": code,
        # A member whose code does not have the given number of bits keeps its default.
        "zero_quantized_gradients_inter_bits": inter_bits if inter_bits in INTER_BITS[code] else None,
        "zero_quantized_gradients_intra_bits": intra_bits if intra_bits in INTRA_BITS[code] else None,
    }
    if member.has_gaussian_gradients:
        values |= {"zero_quantized_gradients_rotation": "none", "zero_quantized_gradients_rounding": "nearest"}
    if member.stage < 2:
        values["zero_gradients_between_microbatches"] = None
    if member.stage == 0:
        values["optimizer_cpu_offload"] = False
    # A flag of this group is refused where it contradicts the member or changes nothing. Here none counts as given, so that every member
    # accepts them, except the two that --zeropp would choose by itself.
    zero_flags = {option.name for option in options() if option.group == "zero"} - {"zero_stage", "zero_hpz_partition_size"}
    return replace(given.with_values(**values), given=(given.given | {"zero_stage"}) - zero_flags)


def _partition(given: Config, ranks: RankCounts) -> int:
    asked = given.zero.zero_hpz_partition_size
    return asked if asked > 1 else ranks.data_ranks_per_node
