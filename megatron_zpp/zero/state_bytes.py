"""The bytes of the state that a rank holds, on its device and on its host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron_zpp.zero.engine import ZeroEngine


@dataclass(frozen=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state. host: those in the memory of the host, if the optimizer's state is kept there."""

    device: int
    host: int


def state_bytes(engine: ZeroEngine) -> StateBytes:
    """What the engine holds on this rank now."""
    at_home = [tensor for unit in engine.units for tensor in unit.tensors_at_home()] + engine.optimizer.live_tensors()
    rungs = [tensor for unit in engine.units for tensor in unit.live_tensors()] + [gradient.total for gradient in engine.gradients]
    rungs += [parameter.grad for unit in engine.units for parameter in unit.parameters if parameter.grad is not None]
    return StateBytes(_bytes(rungs), _bytes(at_home)) if engine.home.is_host else StateBytes(_bytes(rungs + at_home), 0)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of these tensors; one that several of them share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
