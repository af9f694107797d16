"""The parameters, units and uses of a module that shard() divides, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.refusals import is_hooked, is_replaced

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ROOT = "(root)"  # the unit of the parameters that are in no unit that was named

Initializer = Callable[[str, torch.Size], Tensor]


@dataclass(frozen=True)
class ModulePlan:
    """A module's parameters, units and uses, as the engine needs them.

    parameters: by path, each once. aliases: further places of shared parameters, as (module, attribute, path of the parameter).
    """

    parameters: Mapping[str, nn.Parameter]
    unit_specs: tuple[UnitSpec, ...]
    uses: tuple[Use, ...]
    aliases: tuple[tuple[nn.Module, str, str], ...]

    @classmethod
    def of(cls, module: nn.Module, units: Sequence[str]) -> ModulePlan:
        """The plan of `module`. Raises UserError for units that do not exist or overlap."""
        found = _Places({parameter: path for path, parameter in module.named_parameters()})
        uses = [Use(unit, found.units_of(submodule, unit, unit), True) for unit, submodule in _submodules(module, units).items()]
        outer = found.units_of(module, "", ROOT, is_rest=True)
        if outer:
            uses.insert(0, Use("", outer, True))
        return cls(found.parameters, tuple(found.specs), _with_unsure_backwards(uses, found.specs), tuple(found.aliases))


class _Places:
    """The parameters that have been found, in the order of the units."""

    def __init__(self, paths: Mapping[nn.Parameter, str]) -> None:
        """paths: of all parameters, each its first one in the module, which does not depend on the units."""
        self._paths = paths
        self.parameters: dict[str, nn.Parameter] = {}
        self.specs: list[UnitSpec] = []
        self.aliases: list[tuple[nn.Module, str, str]] = []
        self._unit_of: dict[nn.Parameter, str] = {}  # the unit that owns a parameter
        self._owner: dict[tuple[nn.Module, str], str] = {}  # the unit in which a place has been found

    def units_of(self, submodule: nn.Module, path: str, unit: str, *, is_rest: bool = False) -> tuple[str, ...]:
        """The units that a call of the submodule reads; their specs are added. is_rest: whether it has only what is in no other unit."""
        places = [place for place in _places(submodule, path) if not (is_rest and place[:2] in self._owner)]
        new = [parameter for *_, parameter in places if parameter not in self._unit_of]
        kinds = {None if parameter.requires_grad else parameter.dtype for parameter in new}
        own: dict[str, list[ParamSpec]] = {}
        reads: dict[str, None] = {}
        for owner, attribute, place, parameter in places:
            if (owner, attribute) in self._owner:
                raise UserError(
                    f"parameter {place} is in the units '{self._owner[owner, attribute]}' and '{unit}', which hold the same module; "
                    "name one of them. A module that is called more than once in a forward cannot be a unit."
                )
            self._owner[owner, attribute] = unit
            path = self._paths[parameter]
            if place != path:
                self.aliases.append((owner, attribute, path))
            if parameter not in self._unit_of:
                name = _unit_of_kind(unit, kinds, parameter)
                self._unit_of[parameter], self.parameters[path] = name, parameter
                division = Division.undivided(tuple(parameter.shape))
                own.setdefault(name, []).append(ParamSpec(path, division, _zeros, weight_decay=parameter.ndim > 1))
            reads[self._unit_of[parameter]] = None
        if not reads and not is_rest:
            raise UserError(f"unit '{unit}' has no parameters; leave it out of `units`")
        for name, params in own.items():
            if not any(spec.division.numel for spec in params):
                raise UserError(f"the parameters of unit '{name}' have no elements; make them buffers, or name a larger unit")
            value = self.parameters[params[0].name]
            self.specs.append(UnitSpec(name, tuple(params), None if value.requires_grad else value.dtype))
        return tuple(reads)


def _unit_of_kind(unit: str, kinds: AbstractSet[torch.dtype | None], parameter: nn.Parameter) -> str:
    """The name of the unit of a parameter. kinds: of those of this unit, the type of what is frozen, and None for what is trained.

    What is frozen is a unit for each type, because it rests in it.
    """
    if parameter.requires_grad or len(kinds) == 1:
        return unit
    return f"{unit} (frozen)" if len(kinds - {None}) == 1 else f"{unit} (frozen, {str(parameter.dtype).removeprefix('torch.')})"


def _with_unsure_backwards(uses: Sequence[Use], specs: Sequence[UnitSpec]) -> tuple[Use, ...]:
    """The uses. Backward is not sure to reach those before the first one that reads something trained, or is recomputed with others."""
    trained = {spec.name for spec in specs if spec.trains}
    sure = (index for index, use in enumerate(uses) if use.recomputed_in is not None or trained.intersection(use.units))
    first = next(sure, len(uses))
    return tuple(replace(use, backward_is_sure=index >= first) for index, use in enumerate(uses))


def plan_of(module: nn.Module, units: Sequence[str], uses: Sequence[Use] | None, initialize: Initializer | None) -> ModulePlan:
    """The plan of a module, with the arguments of shard(). Raises UserError, naming parameter or unit, for what cannot be sharded."""
    if is_hooked(module):
        raise UserError("the module is sharded already; build a new one")
    plan = ModulePlan.of(module, units)
    _check_parameters(plan.parameters, initialize)
    for path, inner in module.named_modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse:
            raise UserError(f"module {path} makes sparse gradients, which cannot be divided among ranks; make it with sparse=False")
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.max_norm is not None:
            raise UserError(
                f"module {path} has a max_norm: its forward writes to its weights, and the engine would not see that; leave max_norm out"
            )
    for path, buffer in module.named_buffers():
        if buffer.is_meta:
            raise UserError(f"buffer {path} is on the meta device; give it values on the device of the run, for buffers are left alone")
    if uses is None:
        return plan
    return replace(plan, uses=_with_unsure_backwards(_checked_uses(module, uses, plan.unit_specs), plan.unit_specs))


def _submodules(module: nn.Module, units: Sequence[str]) -> dict[str, nn.Module]:
    if isinstance(units, str) or not isinstance(units, Sequence) or not units or not all(isinstance(unit, str) for unit in units):
        raise UserError(f"units is {units!r}; give a list of paths of submodules, such as {_children(module)}")
    found: dict[str, nn.Module] = {}
    for unit in units:
        if unit in found:
            raise UserError(f"unit '{unit}' is named twice; name it once")
        around = next((other for other in units if other != unit and (other == "" or unit.startswith(f"{other}."))), None)
        if around is not None:
            raise UserError(f"unit '{unit}' is inside unit '{around}'; name one of them")
        try:
            found[unit] = module.get_submodule(unit)
        except AttributeError as error:
            raise UserError(f"the module has no submodule '{unit}', which is named as a unit; it has {_children(module)}") from error
        if isinstance(found[unit], (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            raise UserError(f"unit '{unit}' is a {type(found[unit]).__name__}, which is never called; name the modules in it as units")
    return found


def _children(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()]


def _places(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Every attribute in `module` that holds a parameter: its owner, name, path and the parameter."""
    for path, owner in module.named_modules(prefix=prefix):
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, attribute, f"{path}.{attribute}" if path else attribute, parameter


def _check_parameters(parameters: Mapping[str, nn.Parameter], initialize: Initializer | None) -> None:
    devices: dict[torch.device, str] = {}
    for path, parameter in parameters.items():
        devices.setdefault(parameter.device, path)
        if parameter.dtype not in DTYPES:
            raise UserError(
                f"parameter {path} is {parameter.dtype}, which is not supported; cast it to one of {', '.join(map(str, DTYPES))}"
            )
        if is_replaced(parameter):
            raise UserError(f"parameter {path} is shared with a module that is sharded already; shard one module that holds both")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UserError(f"parameter {path} has hooks, which the parameter that replaces it would not have; add hooks after shard()")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("all parameters are frozen, so there is nothing to train; let some of them require gradients")
    if len(devices) > 1:
        found = ", ".join(f"{path} on {device}" for device, path in devices.items())
        raise UserError(f"the parameters are on several devices: {found}; move the module to one of them")
    if ("meta" in {device.type for device in devices}) != (initialize is not None):
        raise UserError(
            "the module is on the meta device, so its parameters have no values; pass `initialize`"
            if initialize is None
            else "`initialize` is for a module on the meta device, and this one has values; leave it out"
        )


def _checked_uses(module: nn.Module, uses: Sequence[Use], specs: Sequence[UnitSpec]) -> tuple[Use, ...]:
    known, paths = {spec.name for spec in specs}, {path for path, _ in module.named_modules()}
    for use in uses:
        if use.module not in paths:
            raise UserError(f"uses names the module '{use.module}', which does not exist; name a submodule by its path")
        if not use.units or not known.issuperset(use.units):
            raise UserError(
                f"the use of '{use.module}' reads {list(use.units)}; the units with parameters of their own are {sorted(known)}"
            )
    if any(not use.module for use in uses[1:]):
        raise UserError("uses names the call of the whole module, '', after other calls; name it first, because they are made within it")
    unread = known.difference(*(use.units for use in uses))
    if unread:
        raise UserError(f"no use reads the units {sorted(unread)}; add the module calls that read them")
    return tuple(uses)


def _zeros(start: int, stop: int) -> Tensor:
    return torch.zeros(stop - start, device="cpu")
