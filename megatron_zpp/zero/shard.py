"""Shards any module: the entry point for programs other than the training script.

    from megatron_zpp.zero.shard import leave_world, shard

    engine = shard(model, ["embedding", "blocks.0", "blocks.1", "head"])  # ZeRO-3 in fp32
    for batch in batches:
        engine.backward(loss_of(model(batch)))
        engine.step(learning_rate=1e-3)
    engine.close()
    leave_world()

examples/ has whole programs.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.comm.backend import Backend, TorchBackend
from megatron_zpp.comm.first_messages import send_first_messages
from megatron_zpp.comm.lanes import make_lanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Ladder
from megatron_zpp.comm.streams import streams_of
from megatron_zpp.config.counted import counted
from megatron_zpp.ops.payload import BLOCK_NUMEL_MULTIPLE
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import end_group, end_world, make_lane_groups
from megatron_zpp.parallel.launch import read_launch
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.parallel.topology import Lane
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.loss_scaler import LossScaler
from megatron_zpp.zero.pieces import parameters, resting_pieces
from megatron_zpp.zero.policy import Policy, Rung
from megatron_zpp.zero.refusals import is_hooked
from megatron_zpp.zero.states import WEIGHT

LONGEST_MISTAKE = 1024  # bytes of a text that ranks exchange
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Initializer = Callable[[str, torch.Size], Tensor]


def shard(
    module: nn.Module,
    units: Sequence[str],
    options: EngineOptions = EngineOptions(),
    *,
    uses: Sequence[Use] | None = None,
    grid: Grid | None = None,
    loss_scaler: LossScaler | None = None,
    initialize: Initializer | None = None,
    backend: Backend | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> ZeroEngine:
    """Shards the parameters of `module` and returns the engine that trains it. Every rank must call it, with the same arguments.

    The world is that of torch.distributed if it is initialized; otherwise this process is a world of one. With torch.distributed,
    parameters move to the current CUDA device if it uses NCCL, else to the CPU. Without it they stay where they are.

    module: its parameters are in fp32, bf16 or fp16, and all of them are trained. They keep their values, which must be the same on every
        rank (call torch.manual_seed first). New nn.Parameter objects replace them, so do not make an optimizer of your own. Shard a module
        only once. Build a module that is too large for one device on the meta device, and pass `initialize`.
    units: paths of submodules, such as "blocks.0", in the order in which forward calls them. The parameters of a unit are gathered
        together before the submodule is called, and freed after it. Larger units make fewer, larger messages and need more memory.
        Every parameter must be in a unit, and no unit may be inside another. A parameter that two units share (tied weights) belongs to
        the first of them, and is gathered for the call of the other as well.
    options: EngineOptions (zero/engine_options.py), with these fields:
        policy: where weights, gradients and optimizer state rest and how they cross the links. POLICIES[0] to POLICIES[3] are the ZeRO
            stages, ZEROPP is ZeRO++ (all from megatron_zpp.zero.policy); its functions with_... add one feature. Default: ZeRO-3.
        dtype: of weights in forward and backward, and of gradients: torch.float32 (default), bfloat16 or float16. Main weights, sums of
            gradients and optimizer state are always fp32. The caller casts inputs and buffers.
        block_numel: neighbouring values that share a scale where values are quantized, a multiple of 32. Default: 256.
        prefetch: how many units ahead of need weights are gathered: Prefetch(inter_uses=2, intra_uses=1).
        adam: AdamOptions(beta1, beta2, eps, weight_decay, backend). Parameters of one dimension (norm gains, biases) do not decay.
        clip_grad: largest norm of the gradient over all parameters, 0 for no clipping. Default: 1.
        full_precision_iterations: first steps in which nothing is quantized. Default: 0.
        noise_seed: seed of stochastic rounding, where the policy asks for it. Default: 0.
        counts_zeros: whether a step counts the zeros in the mean gradient. Default: False.
        make_codec: called with a code of the policy, a dtype and block_numel, returns a codec (rules: comm/codecs.py:Codec). Default:
            comm/codecs.py:make_codec. Plans of memory and time assume that default.
        observer: receives the phases of a step (monitor/observer.py). Default: one that does nothing.
    uses: every module call of a forward in order, with the paths of the units that it reads (parallel/specs.py:Use). Default: one call per
        unit, which reads that unit and those that share parameters with it. Needed if a call reads other units too, for example because a
        weight is passed as an argument, or if several units are recomputed together.
    grid: Grid(world_size, ranks_per_node, partition_ranks). Ranks of a node must be consecutive. Weights climb first between
        partitions, then inside them; partition_ranks (the group size of hpZ) divides ranks_per_node. Default: the nodes of the launcher
        (torchrun sets LOCAL_WORLD_SIZE), with one partition per node.
    loss_scaler: DynamicLossScaler() for fp16 (zero/loss_scaler.py). Default: a scale of 1.
    initialize: for a module on the meta device: initialize(path, shape) returns the first values of a parameter, of any dtype and device.
        Every rank calls it for every parameter in the same order, one after the other, and keeps its own slice.
    backend: other collectives than those of torch.distributed, such as comm/backend.py:VirtualWorld, which runs a world as threads of one
        process; it brings its own grid.
    timeout: of a hop over torch.distributed; a rank that waits for another longer than this fails. Other collectives (the gradient norm,
        full_weights) have the timeout of the default process group. Default: 10 minutes.

    Per step, on every rank: for each micro-batch `engine.backward(loss, microbatches=k, is_last_microbatch=...)` in place of
    loss.backward(), with the mean loss of this rank's micro-batch; then `engine.step(learning_rate)`. To do something in between, call
    `engine.finish_gradients()` and `engine.update(learning_rate)` instead. Gradients are means over micro-batches and ranks; zero_grad()
    is not needed. At the end call `engine.close()`, then leave_world(); a program that does not is told so when it ends.

    Evaluation: call the module under torch.no_grad(), on every rank and equally often.

    Saving: `dict(full_weights(engine))` is a state dict of the parameters in fp32, with shared parameters once; to keep less on a device,
    read full_weights() parameter by parameter. Load it before shard(), with module.load_state_dict(..., strict=False). Adam's moments:
    checkpoint/engine_state.py saves and loads them with the weights, in any world.

    Not supported: a submodule that is called more than once in a forward; a parameter that is read outside of the call of its unit (it is
    NaN there); a unit that returns its own weights, views of them, or objects other than tensors, tuples, lists and dictionaries; a loss
    that reads the inside of a unit without reading what the unit returns; writing in place to what a unit returns while something else
    holds it; frozen parameters; sparse gradients; an optimizer of your own;
    torch.compile over more than a unit. After an error in backward() the module and its engine must be made anew. Buffers are left alone:
    each rank has its own, on the device where the caller puts them.

    Raises ValueError on every rank if the arguments of any rank break these rules, or if arguments or first values differ between ranks. It
    names the parameter or unit and the remedy, and leaves the module as it was (except for an error in values of `initialize`).
    """
    world_size = _world_size(backend)
    rank = backend.rank if backend is not None else dist.get_rank() if world_size > 1 else 0
    probe = backend or TorchBackend(Grid.of_nodes(1, world_size), rank, {})
    device = _device(module, backend)
    with _raising_alike(probe, device):
        grid = _checked_grid(grid, backend, world_size)
        plan = _checked_plan(module, units, options, uses, initialize)
    _check_alike(probe, device, _arguments_as_bytes(plan, grid, options, loss_scaler), "arguments of shard() or shapes of parameters")
    if initialize is None:
        _check_alike(probe, device, _digest_of(plan.parameters.values()), "first values of parameters")

    groups = make_lane_groups(grid, rank, timeout, device) if backend is None else {}
    backend = backend or TorchBackend(grid, rank, groups)
    lanes = make_lanes(streams_of(device))
    if groups and device.type == "cuda":
        send_first_messages(backend, lanes, device)
    ladder = Ladder(backend, lanes, Ledger(grid, rank), device)
    remind = partial(_remind_to_close, rank)
    engine = ZeroEngine(module, plan.unit_specs, plan.uses, options, ladder, loss_scaler, partial(_end_groups, ladder, groups, remind))
    for owner, attribute, path in plan.aliases:
        setattr(owner, attribute, module.get_parameter(path))
    if initialize is None:
        _fill(engine, plan.parameters, None)
    else:
        with _raising_alike(backend, device):
            digest = _fill(engine, plan.parameters, initialize)
        _check_alike(backend, device, digest, "first values of parameters")
    _refuse_state_dicts(module)
    if groups:
        atexit.register(remind)
    return engine


def leave_world() -> None:
    """Ends torch.distributed, if it is initialized. Call it on every rank after engine.close(), as the last thing of the program.

    It also frees what still holds a collective: threads of gloo that free it while the interpreter shuts down abort the process.
    """
    if dist.is_available() and dist.is_initialized():
        end_world()


def full_weights(engine: ZeroEngine) -> Iterator[tuple[str, Tensor]]:
    """Yields path and whole fp32 main weight of every parameter, on the engine's device. Every rank must read it to the end.

    One unit is gathered at a time. The values are those that the optimizer updates; no codec has changed them.
    """
    engine.finish_updates()
    ladder = engine.ladder
    for unit in engine.units:
        own = unit.main_regions().slice_at(ladder.own_slice - unit.first_slice)
        rows = engine.gather_world(torch.cat([part.flatten() for part in own.parts()]).to(ladder.device))[:, ladder.tensor_rank]
        weights = {param.spec.name: rows.new_empty(param.spec.shape) for param in unit.layout.params}
        for data_rank, row in enumerate(rows):
            for segment in unit.layout.segments(ladder.topology.slice_of(data_rank), 1):
                flat = weights[segment.spec.name].view(-1)
                flat[segment.start : segment.stop] = row[segment.offset : segment.offset + segment.stop - segment.start]
        yield from weights.items()


@dataclass(frozen=True)
class _ModulePlan:
    """A module's parameters, units and uses, as the engine needs them.

    parameters: by path, each once. aliases: further places of shared parameters, as (module, attribute, path of the parameter).
    """

    parameters: Mapping[str, nn.Parameter]
    unit_specs: tuple[UnitSpec, ...]
    uses: tuple[Use, ...]
    aliases: tuple[tuple[nn.Module, str, str], ...]

    @classmethod
    def of(cls, module: nn.Module, units: Sequence[str]) -> _ModulePlan:
        """The plan of `module`. Raises ValueError for units that do not exist, overlap, or leave a parameter out."""
        submodules = _submodules(module, units)
        parameters: dict[str, nn.Parameter] = {}
        unit_of: dict[nn.Parameter, tuple[str, str]] = {}  # the unit that owns a parameter, and the parameter's path
        places: dict[tuple[nn.Module, str], str] = {}
        specs, uses, aliases = [], [], []
        for unit, submodule in submodules.items():
            own: list[ParamSpec] = []
            reads: dict[str, None] = {}
            for owner, attribute, path, parameter in _places(submodule, unit):
                if (owner, attribute) in places:
                    raise ValueError(
                        f"parameter {path} is in the units '{places[owner, attribute]}' and '{unit}', which hold the same module; "
                        "name one of them. A module that is called more than once in a forward cannot be sharded."
                    )
                places[owner, attribute] = unit
                if parameter in unit_of:
                    aliases.append((owner, attribute, unit_of[parameter][1]))
                else:
                    unit_of[parameter], parameters[path] = (unit, path), parameter
                    division = Division.undivided(tuple(parameter.shape))
                    own.append(ParamSpec(path, division, _zeros, weight_decay=parameter.ndim > 1))
                reads[unit_of[parameter][0]] = None
            if not reads:
                raise ValueError(f"unit '{unit}' has no parameters; leave it out of `units`")
            if own:
                specs.append(UnitSpec(unit, tuple(own)))
            uses.append(Use(unit, tuple(reads), needs_weights_in_backward=True))
        for owner, attribute, path, _ in _places(module, ""):
            if (owner, attribute) not in places:
                raise ValueError(
                    f"parameter {path} is in no unit; add its submodule to `units`, or move it into a submodule that reads it: "
                    "a parameter has values only while its unit is called"
                )
        return cls(parameters, tuple(specs), tuple(uses), tuple(aliases))


def _checked_plan(
    module: nn.Module, units: Sequence[str], options: EngineOptions, uses: Sequence[Use] | None, initialize: Initializer | None
) -> _ModulePlan:
    """The plan of the module. Raises ValueError for a mistake in the arguments."""
    _check_options(options)
    if is_hooked(module):
        raise ValueError("the module is sharded already; build a new one")
    plan = _ModulePlan.of(module, units)
    _check_parameters(plan.parameters, initialize)
    for path, inner in module.named_modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse:
            raise ValueError(f"module {path} makes sparse gradients, which cannot be divided among ranks; make it with sparse=False")
    for path, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"buffer {path} is on the meta device; give it values on the device of the run, for buffers are left alone")
    return plan if uses is None else replace(plan, uses=_checked_uses(module, uses, plan.unit_specs))


def _submodules(module: nn.Module, units: Sequence[str]) -> dict[str, nn.Module]:
    if isinstance(units, str) or not isinstance(units, Sequence) or not units or not all(isinstance(unit, str) for unit in units):
        raise ValueError(f"units is {units!r}; give a list of paths of submodules, such as {_children(module)}")
    found: dict[str, nn.Module] = {}
    for unit in units:
        if unit in found:
            raise ValueError(f"unit '{unit}' is named twice; name it once")
        around = next((other for other in units if other != unit and (other == "" or unit.startswith(f"{other}."))), None)
        if around is not None:
            raise ValueError(f"unit '{unit}' is inside unit '{around}'; name one of them")
        try:
            found[unit] = module.get_submodule(unit)
        except AttributeError as error:
            raise ValueError(f"the module has no submodule '{unit}', which is named as a unit; it has {_children(module)}") from error
        if isinstance(found[unit], (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
            raise ValueError(f"unit '{unit}' is a {type(found[unit]).__name__}, which is never called; name the modules in it as units")
    return found


def _children(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()]


def _places(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Every attribute in `module` that holds a parameter: its owner, name, path and the parameter."""
    for path, owner in module.named_modules(prefix=prefix):
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, attribute, f"{path}.{attribute}" if path else attribute, parameter


def _zeros(start: int, stop: int) -> Tensor:
    return torch.zeros(stop - start)


def _world_size(backend: Backend | None) -> int:
    if backend is not None:
        return backend.grid.world_size
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _checked_grid(grid: Grid | None, backend: Backend | None, world_size: int) -> Grid:
    if grid is None:
        grid = backend.grid if backend is not None else Grid(world_size, *2 * [_ranks_per_node(world_size)])
    if grid.tensor_ranks > 1:
        raise ValueError(f"the grid has {grid.tensor_ranks} tensor ranks, and shard() divides no layer among ranks; give one with 1")
    if grid.context_ranks > 1:
        raise ValueError(f"the grid has {grid.context_ranks} context ranks, and shard() divides no sample among ranks; give one with 1")
    if grid.world_size != world_size:
        raise ValueError(f"the grid has {counted(grid.world_size, 'rank')} and the world has {world_size}; give the grid of this world")
    if backend is not None and grid != backend.grid:
        raise ValueError(f"the grid is {grid} and that of the backend is {backend.grid}; leave `grid` out")
    return grid


def _ranks_per_node(world_size: int) -> int:
    if world_size == 1:
        return 1
    launch = read_launch(os.environ)
    if launch.local_world_size is None or launch.world_size != world_size:
        raise ValueError(
            f"the launcher does not say how many of the {world_size} ranks share a node: LOCAL_WORLD_SIZE is not set for this world; "
            "start with torchrun, or pass grid=Grid.of_nodes(nodes, ranks_per_node)"
        )
    return launch.local_world_size


def _check_options(options: EngineOptions) -> None:
    if not isinstance(options.policy, Policy):
        raise ValueError(f"policy is {options.policy!r}; choose one of megatron_zpp.zero.policy, such as POLICIES[3] or ZEROPP")
    if options.adam.backend not in ("torch", "apex"):
        raise ValueError(f"the backend of adam is {options.adam.backend!r}; choose torch or apex")
    if options.policy.optimizer is Rung.HOST and options.adam.backend == "apex":
        raise ValueError("the backend of adam is 'apex', which has no AdamW for the host, where the policy keeps it; choose torch")
    if options.full_precision_iterations < 0:
        raise ValueError(f"full_precision_iterations is {options.full_precision_iterations}; choose 0 or more")
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype {options.dtype} is not supported; choose {', '.join(map(str, DTYPES))}")
    if options.block_numel <= 0 or options.block_numel % BLOCK_NUMEL_MULTIPLE:
        raise ValueError(f"block_numel is {options.block_numel}; choose a multiple of {BLOCK_NUMEL_MULTIPLE}")
    if min(options.prefetch.inter_uses, options.prefetch.intra_uses) < 0:
        raise ValueError(f"{options.prefetch} is negative; choose 0 or more units ahead")
    if not options.clip_grad >= 0:
        raise ValueError(f"clip_grad is {options.clip_grad}; choose a positive norm, or 0 for no clipping")


def _check_parameters(parameters: Mapping[str, nn.Parameter], initialize: Initializer | None) -> None:
    devices: dict[torch.device, str] = {}
    for path, parameter in parameters.items():
        devices.setdefault(parameter.device, path)
        if parameter.dtype not in DTYPES:
            raise ValueError(
                f"parameter {path} is {parameter.dtype}, which is not supported; cast it to one of {', '.join(map(str, DTYPES))}"
            )
        if not parameter.requires_grad:
            raise ValueError(
                f"parameter {path} is frozen, and the engine trains all parameters; make it a buffer, or let it require gradients"
            )
    if len(devices) > 1:
        found = ", ".join(f"{path} on {device}" for device, path in devices.items())
        raise ValueError(f"the parameters are on several devices: {found}; move the module to one of them")
    if ("meta" in {device.type for device in devices}) != (initialize is not None):
        raise ValueError(
            "the module is on the meta device, so its parameters have no values; pass `initialize`"
            if initialize is None
            else "`initialize` is for a module on the meta device, and this one has values; leave it out"
        )


def _checked_uses(module: nn.Module, uses: Sequence[Use], specs: Sequence[UnitSpec]) -> tuple[Use, ...]:
    known, paths = {spec.name for spec in specs}, {path for path, _ in module.named_modules()}
    for use in uses:
        if use.module not in paths:
            raise ValueError(f"uses names the module '{use.module}', which does not exist; name a submodule by its path")
        if not use.units or not known.issuperset(use.units):
            raise ValueError(
                f"the use of '{use.module}' reads {list(use.units)}; the units with parameters of their own are {sorted(known)}"
            )
    unread = known.difference(*(use.units for use in uses))
    if unread:
        raise ValueError(f"no use reads the units {sorted(unread)}; add the module calls that read them")
    return tuple(uses)


def _device(module: nn.Module, backend: Backend | None) -> torch.device:
    if backend is None and not (dist.is_available() and dist.is_initialized()):
        parameter = next(module.parameters(), None)
        if parameter is not None and not parameter.is_meta:
            return parameter.device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if backend is None and torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _arguments_as_bytes(plan: _ModulePlan, grid: Grid, options: EngineOptions, loss_scaler: LossScaler | None) -> bytes:
    """Everything that must be the same on all ranks, except the first values. Observers may differ."""
    shapes = {path: (tuple(parameter.shape), parameter.dtype, parameter.is_meta) for path, parameter in plan.parameters.items()}
    fields = {name: value for name, value in vars(options).items() if name != "observer"}
    fields["make_codec"] = getattr(options.make_codec, "__qualname__", type(options.make_codec).__name__)
    scaler = None if loss_scaler is None else (type(loss_scaler).__name__, vars(loss_scaler))
    uses = tuple((use.module, use.units) for use in plan.uses)
    return repr((shapes, uses, grid, fields, scaler)).encode()


def _digest_of(parameters: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _fill(engine: ZeroEngine, first_values: Mapping[str, nn.Parameter], initialize: Initializer | None) -> bytes:
    """Writes the first values into the main weights. Returns a digest of those that `initialize` gave."""
    own = {piece.parameter: piece for piece in resting_pieces(engine) if piece.state == WEIGHT}
    digest = hashlib.blake2b()
    for placed in parameters(engine):
        path, shape = placed.spec.name, torch.Size(placed.spec.shape)
        values = initialize(path, shape) if initialize is not None else first_values[path]
        if values.shape != shape:
            raise ValueError(f"initialize gave {list(values.shape)} values for parameter {path}, which has {list(shape)}")
        flat = values.detach().to(torch.float32).flatten()
        if initialize is not None:
            digest.update(_digest_of([flat]))
        if path in own:
            own[path].values.copy_(flat[own[path].start : own[path].stop])
    engine.weights_changed()
    return digest.digest()


@contextmanager
def _raising_alike(backend: Backend, device: torch.device) -> Iterator[None]:
    """Raises ValueError on every rank if the block raises one on any: with its own text, or with that of the first rank that has one."""
    mistake = ""
    try:
        yield
    except ValueError as error:
        mistake = str(error)
    own = torch.tensor(list(mistake.encode()[:LONGEST_MISTAKE].ljust(LONGEST_MISTAKE, b"\0")), dtype=torch.uint8, device=device)
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in backend.gather_world(own).flatten(0, 1).tolist()]
    for rank, text in enumerate(texts):
        if text:
            raise ValueError(mistake or f"{text} (on rank {rank})")


def _end_groups(ladder: Ladder, groups: Mapping[Lane, dist.ProcessGroup], remind: Callable[[], None]) -> None:
    """Ends the process groups of the lanes, once no rank needs them any more."""
    ladder.gather_world(torch.zeros(1, device=ladder.device))
    for group in groups.values():
        end_group(group)
    atexit.unregister(remind)


def _remind_to_close(rank: int) -> None:
    """Says what is wrong with a program that ends before it has closed its engine, unless it ends in a traceback."""
    if not hasattr(sys, "last_type"):
        print(
            f"rank {rank}: the program ends before engine.close(), so an error in weights gathered ahead would not be seen, and threads of "
            "the collectives may abort the process; end the program with engine.close(), then leave_world()",
            file=sys.stderr,
            flush=True,
        )


def _refuse_state_dicts(module: nn.Module) -> None:
    """Makes the module and all modules in it that have parameters neither give nor take a state dict."""
    for inner in module.modules():
        if next(inner.parameters(), None) is not None:
            inner.register_state_dict_pre_hook(_refuse_state_dict)
            inner.register_load_state_dict_pre_hook(_refuse_load)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError("the weights of a sharded module are not in its parameters; use dict(full_weights(engine)), on every rank")


def _refuse_load(module: nn.Module, *arguments: Any) -> None:
    raise RuntimeError("the weights of a sharded module are not in its parameters, so it cannot load any; load them before shard()")


def _check_alike(backend: Backend, device: torch.device, content: bytes, what: str) -> None:
    """Raises ValueError on every rank if `content` is not the same on all of them."""
    number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
    numbers = backend.gather_world(torch.tensor([number], device=device)).flatten().tolist()
    others = [rank for rank, other in enumerate(numbers) if other != numbers[0]]
    if others:
        raise ValueError(f"the {what} of ranks {others} differ from those of rank 0; give every rank the same (torch.manual_seed)")
