"""A model's description for the sharding engine: parameters, the units that are gathered together, and the order of their uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_zpp.parallel.division import SharedRange

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its path in the module, its shape and its initial values.

    initial_values: (start, stop) -> fp32 [stop - start], elements of the flattened parameter. An element has the same value in every range.
    shared: the ranges of the flattened parameter that other tensor ranks hold, too, in order.
    """

    name: str  # dotted attribute path in the module, e.g. "blocks.0.attention.qkv.weight"
    shape: tuple[int, ...]
    initial_values: Callable[[int, int], Tensor]
    weight_decay: bool
    shared: tuple[SharedRange, ...] = ()


@dataclass(frozen=True)
class UnitSpec:
    """A unit: parameters that are gathered together."""

    name: str  # "embedding", "block.0", ..., "final_norm", "head"
    params: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class Use:
    """One module call, in execution order, and the units it reads."""

    module: str  # dotted path of the submodule that is called
    units: tuple[str, ...]
    needs_weights_in_backward: bool
    recomputed_in: int | None = None  # number of the chunk of neighbouring uses that backward recomputes together; None: not recomputed
