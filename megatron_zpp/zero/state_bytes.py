"""The bytes of the state that a rank holds, on its device and on its host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.home import Home
from megatron_zpp.zero.optimizer import ShardedAdamW
from megatron_zpp.zero.unit import WeightUnit


@dataclass(frozen=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state. host: those in the memory of the host, if the optimizer's state is kept there."""

    device: int
    host: int


def state_bytes(units: Sequence[WeightUnit], gradients: Sequence[UnitGradient], optimizer: ShardedAdamW, home: Home) -> StateBytes:
    """What these parts of an engine hold on this rank now."""
    at_home = [tensor for unit in units for tensor in unit.tensors_at_home()] + optimizer.live_tensors()
    rungs = [tensor for unit in units for tensor in unit.live_tensors()] + [gradient.total for gradient in gradients]
    rungs += [parameter.grad for unit in units for parameter in unit.parameters if parameter.grad is not None]
    return StateBytes(_bytes(rungs), _bytes(at_home)) if home.is_host else StateBytes(_bytes(rungs + at_home), 0)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of these tensors; one that several of them share counts once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
