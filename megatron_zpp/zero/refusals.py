"""What is refused of a sharded module, because its numbers would be wrong: RuntimeError, with the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_zpp.parallel.specs import Use
from megatron_zpp.zero.hooks import before_forward
from megatron_zpp.zero.schedule import Phase, backward_starts, first_uses
from megatron_zpp.zero.unit import WeightUnit

# torch.autocast casts a weight once, and its gradient comes where the cast was made: in an earlier forward of the same context.
_AND_AUTOCAST = ", and enter torch.autocast anew for every forward, or pass cache_enabled=False to it"


def is_hooked(module: nn.Module) -> bool:
    """Whether this module or one in it has, or had, an engine."""
    hooks = [hook for inner in module.modules() for hook in inner._forward_pre_hooks.values()]
    return any(isinstance(hook, _Closed) or (isinstance(hook, partial) and hook.func is before_forward) for hook in hooks)


def refuse_forward(module: nn.Module, uses: Sequence[Use]) -> None:
    """Makes each use's forward raise RuntimeError, because the engine of the module is closed."""
    for use in uses:
        module.get_submodule(use.module).register_forward_pre_hook(_Closed(), prepend=True)


class _Closed:
    """The hook of a module whose engine is closed. The module can be neither called nor copied nor saved."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        raise RuntimeError(f"{type(module).__name__} has no weights any more, because its engine is closed")

    def __reduce__(self) -> str:
        raise RuntimeError(
            "the module has no weights any more, because its engine is closed; read full_weights(engine) before engine.close()"
        )


def refuse_changed(units: Iterable[WeightUnit]) -> None:
    """Refuses parameters that were changed after they were sharded: frozen, so that the engine would let their weights decay; no longer
    frozen, so that it would not train them; or written to, which does not change the main weights."""
    for unit in units:
        for parameter, placed in zip(unit.parameters, unit.layout.params, strict=True):
            if parameter.requires_grad is not unit.trains:
                change = "frozen" if unit.trains else "made to require gradients"
                raise RuntimeError(
                    f"parameter {placed.spec.name} was {change} after shard(), and the engine does not see that; do it before"
                )
            if parameter._version:  # the engine gives a parameter other storage, but never writes to it as a tensor
                raise RuntimeError(
                    f"parameter {placed.spec.name} was written to after shard(), and the engine does not see that; write to it before "
                    "shard(), or let forward compute another tensor from it"
                )


def refuse_replaced(path: str, parameter: nn.Parameter) -> None:
    """Refuses gradients of a parameter that shard() has replaced: what still reads it is not trained."""
    parameter.register_hook(partial(_refuse_replaced, path))


def is_replaced(parameter: nn.Parameter) -> bool:
    """Whether shard() has replaced this parameter in some module."""
    return any(isinstance(hook, partial) and hook.func is _refuse_replaced for hook in (parameter._backward_hooks or {}).values())


def _refuse_replaced(path: str, gradient: Tensor) -> None:
    raise RuntimeError(
        f"parameter {path} was replaced by shard(), and something reads the old one, such as a list, a function or another module; "
        f"read it as the attribute {path} of the sharded module"
    )


def refuse_order(use: Use) -> None:
    """Refuses a call that comes after those of later uses in one forward: ranks that leave out some of them would take other hops."""
    raise RuntimeError(
        f"{use.module or 'the module'} is called in another order than that of `units` (or `uses`); name the units in the order in "
        "which forward calls them, on every rank"
    )


def refuse_views(unit: WeightUnit, outputs: Sequence[Tensor]) -> None:
    """Refuses outputs that are views of the unit's weights, whose storage is freed when the unit rests. Call it while they are there."""
    weights = unit.parameters[0].untyped_storage()._cdata
    if any(_storage_of(output) == weights for output in outputs):
        raise RuntimeError(
            f"unit {unit.name}: a module returns a view of its weights, which are freed after its call; let it return a copy (.clone())"
        )


def full_at_gradients(uses: Sequence[Use]) -> frozenset[str]:
    """The units whose weights are there whenever a gradient of them is complete: in the backward of their first use.

    The last of several modules that are recomputed together is not among them: its biases have their gradients before it is recomputed.
    """
    starts = backward_starts(uses)
    return frozenset(
        unit
        for unit, index in first_uses(uses).items()
        if uses[index].needs_weights_in_backward and starts[index].phase is Phase.PRE_BACKWARD
    )


def refuse_gradient_without_weights(unit: WeightUnit, index: int) -> None:
    """Refuses the gradient of parameter `index` if the unit's weights are not there, so that backward has read something else."""
    if not unit.is_full:
        raise RuntimeError(
            f"unit {unit.name}: the gradient of {unit.layout.params[index].spec.name} was computed without the unit's weights, because "
            f"backward has not come through what the unit returns; compute the loss from what units return{_AND_AUTOCAST}"
        )


def refuse_late_gradient(unit: WeightUnit, index: int) -> None:
    """Refuses the gradient of parameter `index`, because the unit's gradient has descended already, with zeros for this parameter."""
    raise RuntimeError(
        f"unit {unit.name}: the gradient of {unit.layout.params[index].spec.name} came after the turn of its unit, from none of the calls "
        f"on which the loss depends; compute the loss from what units return{_AND_AUTOCAST}"
    )


def refuse_old_forward() -> None:
    """Refuses the backward of a call before the last step: the weights have changed since, so its gradients would be wrong."""
    raise RuntimeError(
        "the loss was computed before the last engine.step(), or engine.start_iteration(), and the weights are others; compute it again"
    )


def refuse_other_backward() -> None:
    """Refuses a backward that the engine of the module has not begun."""
    raise RuntimeError(
        "call engine.backward(loss) instead of loss.backward() or torch.autograd.grad(), with the engine of this module; a loss cannot go "
        "through the modules of two engines, so shard one of them, or one module that holds both"
    )


def refuse_state_dicts(module: nn.Module) -> None:
    """Makes the module and all modules in it that have parameters neither give nor take a state dict."""
    for inner in module.modules():
        if next(inner.parameters(), None) is not None:
            inner.register_state_dict_pre_hook(_refuse_state_dict)
            inner.register_load_state_dict_pre_hook(_refuse_load)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError("the weights of a sharded module are not in its parameters; use dict(full_weights(engine)), on every rank")


def _refuse_load(module: nn.Module, *arguments: Any) -> None:
    raise RuntimeError("the weights of a sharded module are not in its parameters, so it cannot load any; load them before shard()")


def _storage_of(tensor: Tensor) -> int:
    """The identity of the storage of a tensor; 0 if it has none of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses that hold other tensors
        return 0
