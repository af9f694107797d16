"""What the module of a use returns, and how backward is noticed when it comes back to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_zpp.zero.calls import Call

# What may be in an output. Anything else could hold tensors whose gradients nothing would announce.
_KNOWN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Outputs:
    """The output of a module: a tensor, or tensors in tuples, lists and dictionaries. Raises RuntimeError for another one.

    tensors: all of them, in order.
    """

    def __init__(self, module: nn.Module, output: Any) -> None:
        self._output = output
        self._leaves: list[Any]
        self._structure: TreeSpec
        self._leaves, self._structure = tree_flatten(output)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        unknown = next((leaf for leaf in self._leaves if not isinstance(leaf, _KNOWN)), None)
        if unknown is not None or not self.tensors:
            found = type(output if unknown is None else unknown).__name__
            raise RuntimeError(
                f"{type(module).__name__}, the module of a use, returns {found}; it must return a tensor, or tensors in tuples, lists and "
                "dictionaries"
            )

    def watched(self, before_backward: Callable[[], None], call: Call | None) -> Any:
        """The same output. When all gradients of its tensors have come, `before_backward` is called, then they go on into the module.

        call: the call of the module, which `calls_of` finds.
        """
        by_id = {id(tensor): tensor for tensor in self.tensors if tensor.requires_grad}
        if not (torch.is_grad_enabled() and by_id):
            return self._output
        tensors = _Watch.apply(before_backward, call, *by_id.values())
        watched = dict(zip(by_id, tensors, strict=True))  # one that is returned twice stays one
        return tree_unflatten([watched.get(id(leaf), leaf) for leaf in self._leaves], self._structure)


def calls_of(loss: Tensor) -> Iterator[Call]:
    """The calls whose watched outputs `loss` depends on."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            call = getattr(node, "call", None)
            if isinstance(call, Call):
                yield call


class _Watch(torch.autograd.Function):
    """Returns its tensors as they are; its backward calls `before_backward` and passes their gradients on.

    A hook on an output would not do: the output may be the input of the module, which has hooks already, or a view, which loses its hooks
    when it is written to. This node belongs to one call of one module, and is made after all others of the call. So autograd runs it before
    those that recompute the module, and before those of a loss that the module keeps beside its output.

    What it returns shares memory with its tensors and has another history. So its backward raises RuntimeError if one of them is still held
    somewhere and was written to: its values have changed and its history has not, so gradients would be wrong.
    """

    @staticmethod
    def forward(ctx: Any, before_backward: Callable[[], None], call: Call | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.before_backward = before_backward
        ctx.call = call
        ctx.versions = [(weakref.ref(tensor), tensor._version) for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        held = [(tensor, version) for reference, version in ctx.versions if (tensor := reference()) is not None]
        if any(tensor._version != version for tensor, version in held):
            raise RuntimeError(
                "a tensor that a module returned was written to in place while something else, such as an attribute of the module, "
                "holds it; keep or write to a copy (.clone())"
            )
        ctx.before_backward()
        return (None, None, *gradients)
