"""The whole configuration: one frozen dataclass per group (config/groups), one field per flag.

The flag of a field is its name with dashes: `num_layers` is `--num-layers`. The type of a field is that after `resolve.resolve`.
Before that, a field whose default depends on other flags or on the world is None unless the user gave it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from megatron_zpp.config.groups.checkpoint import CheckpointConfig
from megatron_zpp.config.groups.data import DataConfig
from megatron_zpp.config.groups.diloco import DilocoConfig
from megatron_zpp.config.groups.distributed import DistributedConfig
from megatron_zpp.config.groups.logging import LoggingConfig
from megatron_zpp.config.groups.model import ModelConfig
from megatron_zpp.config.groups.optimizer import OptimizerConfig
from megatron_zpp.config.groups.plan import PlanConfig
from megatron_zpp.config.groups.precision import PrecisionConfig
from megatron_zpp.config.groups.profiling import ProfilingConfig
from megatron_zpp.config.groups.training import TrainingConfig
from megatron_zpp.config.groups.zero import ZeroConfig
from megatron_zpp.config.sample_lengths import SampleLengths


@dataclass(frozen=True)
class Config:
    """All flags in their groups, with notices and assumptions about them.

    given: names of the fields that the user set. implied: those of them that --zeropp set. notices: lines to print. assumptions: what the
    run assumes, one line each. sources: where the value of a field comes from, if not from the flag of its name. earlier_samples: those
    that a run that goes on has consumed, see SampleLengths.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    given: frozenset[str] = frozenset()
    notices: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    implied: frozenset[str] = field(default=frozenset(), compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    earlier_samples: tuple[tuple[int, int], ...] = ()

    @property
    def sample_lengths(self) -> SampleLengths:
        """Tokens of each sample of the run."""
        return SampleLengths(self.model.seq_length, self.earlier_samples)

    def with_values(self, **values: Any) -> Config:
        """The same configuration with these fields replaced. Field names are unique among groups."""
        by_group: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in values.items():
            by_group[GROUP_OF_FIELD[name]][name] = value
        changes: dict[str, Any] = {group: replace(getattr(self, group), **members) for group, members in by_group.items()}
        return replace(self, **changes)

    def with_notices(self, *lines: str) -> Config:
        return replace(self, notices=self.notices + lines)

    def value_of(self, name: str) -> Any:
        return getattr(getattr(self, GROUP_OF_FIELD[name]), name)


PLAN_GROUP = "plan"
GROUPS: dict[str, type] = {name: type(group) for name, group in vars(Config()).items() if is_dataclass(group)}
GROUP_OF_FIELD: dict[str, str] = {member.name: group for group, members in GROUPS.items() for member in fields(members)}
