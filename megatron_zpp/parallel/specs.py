"""A model's description for the sharding engine: parameters, the units that are gathered together, and the order of their uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_zpp.parallel.division import Division, SharedRange

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its path in the module, this rank's part of it, and the initial values of that part.

    initial_values: (start, stop) -> fp32 [stop - start], elements of the flattened part. An element of the whole parameter has the same
    value in every range and in every part.
    """

    name: str  # dotted attribute path in the module, e.g. "blocks.0.attention.qkv.weight"
    division: Division
    initial_values: Callable[[int, int], Tensor]
    weight_decay: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part, which is that of its buffers."""
        return self.division.local_shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, which is that of the model and of its checkpoints."""
        return self.division.shape

    @cached_property
    def shared(self) -> tuple[SharedRange, ...]:
        """The ranges of the flattened part that other tensor ranks hold, too."""
        return tuple(self.division.shared())


@dataclass(frozen=True)
class UnitSpec:
    """A unit: parameters that are gathered together.

    frozen_in: the element type in which they rest if all of them are frozen. None if all are trained: they rest in fp32.
    """

    name: str  # "embedding", "block.0", ..., "final_norm", "head"
    params: tuple[ParamSpec, ...]
    frozen_in: torch.dtype | None = None

    @property
    def trains(self) -> bool:
        """Whether the parameters are trained."""
        return self.frozen_in is None


@dataclass(frozen=True)
class Use:
    """One module call, in execution order, and the units it reads.

    The first of several uses may have the path "": this is the call of the whole module, within which all others are made. Its units are
    there from the beginning of forward to the end of backward.
    """

    module: str  # dotted path of the submodule that is called
    units: tuple[str, ...]
    needs_weights_in_backward: bool
    recomputed_in: int | None = None  # number of the chunk of neighbouring uses that backward recomputes together; None: not recomputed
    backward_is_sure: bool = True  # no: backward reaches it only if its input requires gradients, because nothing is trained up to here


def outer_units(uses: Sequence[Use]) -> tuple[str, ...]:
    """The units that the call of the whole module reads; none if the first use is not this call."""
    return uses[0].units if len(uses) > 1 and not uses[0].module else ()
