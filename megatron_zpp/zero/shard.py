"""Shards any module: the entry point for programs other than the training script.

    from megatron_zpp import leave_world, shard

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
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.comm.backend import Backend, TorchBackend, VirtualBackend
from megatron_zpp.comm.waits import Waits
from megatron_zpp.comm.world_links import WorldLinks, has_world
from megatron_zpp.config.counted import counted
from megatron_zpp.config.flag import any_of, divisors
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.monitor.profiler import LabelObserver
from megatron_zpp.ops import extension
from megatron_zpp.ops.payload import BLOCK_NUMEL_MULTIPLE
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import end_world
from megatron_zpp.parallel.islands import ranks_of_islands
from megatron_zpp.parallel.launch import read_launch
from megatron_zpp.parallel.specs import Use
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.alike import check_alike, digest_of, raising_alike
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.loss_scaler import LossScaler
from megatron_zpp.zero.module_plan import DTYPES, Initializer, ModulePlan, plan_of
from megatron_zpp.zero.pieces import parameters, resting_pieces
from megatron_zpp.zero.policy import WEIGHT, Policy, Rung
from megatron_zpp.zero.refusals import refuse_replaced, refuse_state_dicts

_log = logging.getLogger(__name__)


def shard(
    module: nn.Module,
    units: Sequence[str],
    options: EngineOptions = EngineOptions(),
    *,
    uses: Sequence[Use] | None = None,
    grid: Grid | None = None,
    loss_scaler: LossScaler | None = None,
    initialize: Initializer | None = None,
    islands: int = 1,
    backend: Backend | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> ZeroEngine:
    """Shards the parameters of `module` and returns the engine that trains it. Every rank must call it, with the same arguments.

    The world is that of torch.distributed if it is initialized; otherwise this process is a world of one. With torch.distributed,
    parameters move to the current CUDA device if it uses NCCL, else to the CPU. Without it they stay where they are.

    module: its parameters are in fp32, bf16 or fp16. They keep their values, which must be the same on every rank (call torch.manual_seed
        first). New nn.Parameter objects replace them, so do not make an optimizer of your own. Shard a module only once. Build a module
        that is too large for one device on the meta device, and pass `initialize`. Parameters that do not require gradients are frozen:
        they are gathered like others and rest in the type that they have, without gradients and optimizer state. No step changes them, so
        what is kept within a step stays: with hpZ, lean and in stages 1 and 2 they cross between nodes once, as they are.
    units: paths of submodules, such as "blocks.0", in the order in which forward calls them. The parameters of a unit are gathered
        together before the submodule is called, and freed after it. Larger units make fewer, larger messages and need more memory.
        No unit may be inside another. What is in none of them belongs to the root, a unit that is gathered when the module is called and
        freed after its backward. A parameter that two units share (tied weights) belongs to the first of them, and is gathered for the
        call of the other as well.
    options: EngineOptions (zero/engine_options.py), with these fields:
        policy: where weights, gradients and optimizer state rest and how they cross the links. POLICIES[0] to POLICIES[3] are the ZeRO
            stages, ZEROPP is ZeRO++, LEAN has the fewest bytes between nodes; the functions with_... add one feature. Default: ZeRO-3.
        dtype: of weights in forward and backward, and of gradients: torch.float32 (default), bfloat16 or float16. Main weights of what is
            trained, sums of gradients and optimizer state are always fp32. The caller casts inputs and buffers.
        block_numel: neighbouring values that share a scale where values are quantized, a multiple of 32. Default: 256.
        prefetch: how many units ahead of need weights are gathered: Prefetch(inter_uses=2, intra_uses=1).
        adam: AdamOptions(beta1, beta2, eps, weight_decay, backend). Parameters of one dimension (norm gains, biases) do not decay.
        clip_grad: largest norm of the gradient over all parameters, 0 for no clipping. Default: 1.
        full_precision_iterations: first steps in which nothing is quantized. Default: 0.
        noise_seed: seed of stochastic rounding, where the policy asks for it. Default: 0.
        counts_zeros: whether a step counts the zeros in the mean gradient. Default: False.
        make_codec: called with a code of the policy, a dtype and block_numel, returns a codec (rules: comm/codec.py:Codec). Default:
            comm/codecs.py:make_codec. Plans of memory and time assume that default.
        observer: receives phases, hops and units of a step (monitor/observer.py). Default: one that names them in the traces of torch's
            profiler.
    uses: every module call of a forward in order, with the paths of the units that it reads (parallel/specs.py:Use). Default: one call per
        unit, which reads that unit and those that share parameters with it; before them that of the module "", if it has a root (its unit
        is "(root)"). Needed if a call reads other units too, for example because a weight is passed as an argument, or if several units
        are recomputed together.
    grid: of one island, Grid(world_size, ranks_per_node, partition_ranks). Ranks of a node must be consecutive. Weights climb first between
        partitions, then inside them; partition_ranks (the group size of hpZ) divides ranks_per_node. Default: the nodes of the launcher
        (torchrun sets LOCAL_WORLD_SIZE), with one partition per node.
    loss_scaler: DynamicLossScaler() for fp16 (zero/loss_scaler.py). Default: a scale of 1.
    initialize: for a module on the meta device: initialize(path, shape) returns the first values of a parameter, of any dtype and device.
        Every rank calls it for every parameter in the same order, one after the other, and keeps its own slice.
    islands: how many copies of the module are trained apart, each by equally many consecutive ranks: a part of a node, a node, or several
        whole ones. To the engine an island is the whole world, so `grid`, rank, world_size, data_rank and gather_world() are those of the
        island. join_islands() (outer/join.py) brings the copies together now and then. Default: 1, all ranks train one.
    backend: other collectives than those of torch.distributed, such as comm/backend.py:VirtualWorld, which runs a world as threads of one
        process; it brings its own grid, that of an island, and serves one engine.
    timeout: of a hop over torch.distributed; a rank that waits for another longer than this fails. Other collectives (the gradient norm,
        full_weights) have the timeout of the default process group, or with islands this one. Default: 10 minutes.

    Kernels that are built (python -m megatron_zpp.ops.extension) are loaded. On GPUs a policy that quantizes needs them, unless
    MEGATRON_ZPP_REFERENCE_OPS=1 is in the environment.

    Per step, on every rank: for each micro-batch `engine.backward(loss, microbatches=k, is_last_microbatch=...)` in place of
    loss.backward(), with the mean loss of this rank's micro-batch; then `engine.step(learning_rate)`. To do something in between, call
    `engine.finish_gradients()` and `engine.update(learning_rate)` instead. Gradients are means over micro-batches and ranks; zero_grad()
    is not needed. At the end call `engine.close()`, then leave_world(); a program that does not is told so when it ends.

    A parameter that no rank's loss reaches in a step is passed over, as by plain AdamW without a gradient: it neither decays nor goes on by
    its moments, and does not count the step.

    Several forwards may be open before their backward. A loss that joins them must read each of them on every rank; it holds the gradients
    of all units until its backward ends.

    Evaluation: call the module under torch.no_grad(), on every rank and equally often.

    Every rank calls the units in the order of `units`. The ranks compare the order of their messages in update(): if it differs, every rank
    raises RuntimeError with the first message that does, and no weight changes.

    Ranks may leave out different units, or call them under torch.no_grad() in a training forward. A program that calls units and never the
    module itself calls a unit under torch.no_grad() on every rank or on none. It must call the last unit on every rank: in evaluation
    always, in training unless engine.backward() is the next call after the forward.

    Saving: save() and load() (checkpoint/sharded_module.py) for all states, in any world. `dict(full_weights(engine))` is a state dict of
    the parameters in fp32, with shared parameters once and without buffers (add those of module.named_buffers()); to keep less on a
    device, read full_weights() parameter by parameter. Load it before shard(), with module.load_state_dict(..., strict=False).

    Not supported; what would give wrong numbers is refused, except where a line says otherwise:

    - sparse gradients, an optimizer of your own, copies and pickles of the module; freezing later, or training what was frozen;
    - a unit that is called more than once in a forward;
    - where nothing up to a unit is trained: inputs that require gradients on some ranks only, a rank that then leaves out all such units,
      and a loss that reads the inside of a frozen unit without reading what it returns (unnoticed);
    - a parameter that is read outside of the call of its unit or, if it belongs to the root, of the module (it is NaN there), or written to
      (through `.data` it goes unnoticed);
    - a parameter from before shard(), such as one in a list that the module keeps;
    - a unit that returns its own weights, views of them, or objects other than tensors, tuples, lists and dictionaries; a module that
      returns weights of the root;
    - writing in place to what a unit, or a module with a root, returns while something else holds it (unnoticed where it returned its own
      input);
    - a loss that reads the inside of a unit without reading what the unit returns, or that goes through the modules of two engines;
    - torch.autograd.grad() through the module, as for a gradient penalty;
    - torch.compile over more than a unit, and one torch.autocast around several forwards, unless with cache_enabled=False.

    After an error in forward that all ranks have met alike, go on with the next forward. After one in backward() the module and its engine
    must be made anew: some gradients are missing. Buffers are left alone: each rank has its own, on the device where the caller puts them.

    Raises UserError on every rank if the arguments of any rank break these rules, or if arguments or first values differ between ranks. It
    names the parameter or unit and the remedy, and leaves the module as it was (except for an error in values of `initialize`).
    """
    world_size = _world_size(backend)
    rank = backend.rank if backend is not None else dist.get_rank() if world_size > 1 else 0
    everyone = backend or TorchBackend(Grid.of_nodes(1, world_size), rank, {})
    device = _device(module, backend)
    with raising_alike(everyone, device):
        _check_backend(backend)
        grid = _checked_grid(grid, backend, world_size, _checked_islands(islands, backend, world_size))
        _check_options(options)
        _check_loss_scaler(loss_scaler)
        _load_kernels(options.policy, device)
        plan = plan_of(module, units, uses, initialize)
    check_alike(everyone, device, _arguments_as_bytes(plan, grid, options, loss_scaler), "arguments of shard() or shapes of parameters")
    if initialize is None:
        check_alike(everyone, device, digest_of(plan.parameters.values()), "first values of parameters")

    if type(options.observer) is Observer:
        options = replace(options, observer=LabelObserver())  # of this engine alone, for it remembers the unit that computes
    if backend is not None:
        made = WorldLinks.over(backend, device, options.observer)
    else:
        made = WorldLinks.connect(grid, ranks_of_islands(world_size, islands), device, timeout, Waits(observer=options.observer))
    remind = partial(_remind_to_close, rank)
    engine = ZeroEngine(module, plan.unit_specs, plan.uses, options, made.links, loss_scaler, partial(_end, made, remind))
    if isinstance(backend, VirtualBackend):
        backend.serves_engine = True
    for owner, attribute, path in plan.aliases:
        setattr(owner, attribute, module.get_parameter(path))
    if initialize is None:
        _fill(engine, plan.parameters, None)
    else:
        with raising_alike(everyone, device):
            digest = _fill(engine, plan.parameters, initialize)
        check_alike(everyone, device, digest, "first values of parameters")
    refuse_state_dicts(module)
    for path, parameter in plan.parameters.items():
        if parameter.requires_grad:
            refuse_replaced(path, parameter)
    if made.groups:
        atexit.register(remind)
    _tell(engine)
    return engine


def leave_world() -> None:
    """Ends torch.distributed, if it is initialized. Call it on every rank after engine.close(), as the last thing of the program.

    It also frees what still holds a collective: threads of gloo that free it while the interpreter shuts down abort the process.
    """
    if has_world():
        dist.barrier()
        end_world()


def full_weights(engine: ZeroEngine, *, with_frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields path and whole main weight of every parameter, in fp32 on the engine's device. Every rank must read it to the end.

    One unit is gathered at a time. The values are those that the optimizer updates; no codec has changed them.
    with_frozen: whether frozen parameters are among them.
    """
    engine.finish_updates()
    links = engine.links
    for unit in engine.units if with_frozen else engine.trained:
        own = unit.main_regions().slice_at(links.own_slice - unit.first_slice)
        rows = engine.gather_world(torch.cat([part.flatten() for part in own.parts()]).to(links.device))[:, links.tensor_rank]
        weights = {param.spec.name: rows.new_empty(param.spec.shape) for param in unit.layout.params}
        for data_rank, row in enumerate(rows):
            for segment in unit.layout.segments(links.topology.slice_of(data_rank), 1):
                flat = weights[segment.spec.name].view(-1)
                flat[segment.start : segment.stop] = row[segment.offset : segment.offset + segment.stop - segment.start]
        yield from ((path, weight.float()) for path, weight in weights.items())


def _world_size(backend: Backend | None) -> int:
    if backend is not None:
        return backend.grid.world_size
    return dist.get_world_size() if has_world() else 1


def _check_backend(backend: Backend | None) -> None:
    if isinstance(backend, VirtualBackend) and backend.serves_engine:
        raise UserError(
            "the backend serves an engine already, and messages of two would mix; start the ranks as processes and leave out `backend`; "
            "there each engine has process groups of its own"
        )


def _checked_islands(islands: int, backend: Backend | None, world_size: int) -> int:
    if backend is not None and islands != 1:
        raise UserError(f"islands is {islands}, and a backend is that of one island; leave `islands` out")
    if type(islands) is not int or islands < 1 or world_size % islands:
        raise UserError(
            f"islands is {islands!r}, which does not divide the {counted(world_size, 'rank')}; choose {any_of(divisors(world_size))}"
        )
    return islands


def _checked_grid(grid: Grid | None, backend: Backend | None, all_ranks: int, islands: int) -> Grid:
    """The grid of one island."""
    world_size = all_ranks // islands
    if grid is None:
        grid = backend.grid if backend is not None else Grid(world_size, *2 * [_ranks_per_node(all_ranks, islands)])
    if grid.tensor_ranks > 1:
        raise UserError(f"the grid has {grid.tensor_ranks} tensor ranks, and shard() divides no layer among ranks; give one with 1")
    if grid.context_ranks > 1:
        raise UserError(f"the grid has {grid.context_ranks} context ranks, and shard() divides no sample among ranks; give one with 1")
    if grid.world_size != world_size:
        whose = "the world has" if islands == 1 else f"each of {islands} islands has"
        raise UserError(
            f"the grid has {counted(grid.world_size, 'rank')} and {whose} {world_size}; give the grid of {counted(world_size, 'rank')}"
        )
    if backend is not None and grid != backend.grid:
        raise UserError(f"the grid is {grid} and that of the backend is {backend.grid}; leave `grid` out")
    return grid


def _ranks_per_node(world_size: int, islands: int) -> int:
    """Those of a node of one island. An island that is a part of a node is a node of its own."""
    island_ranks = world_size // islands
    if island_ranks == 1:
        return 1
    launch = read_launch(os.environ)
    if launch.local_world_size is None or launch.world_size != world_size:
        finding = launch.unequal_nodes or (
            f"the launcher does not say how many of the {world_size} ranks share a node: LOCAL_WORLD_SIZE is not set for this world"
        )
        raise UserError(f"{finding}; start with torchrun, or pass grid=Grid.of_nodes(nodes, ranks_per_node)")
    of_node = launch.local_world_size
    choices = [count for count in divisors(world_size) if (world_size // count) % of_node == 0 or of_node % (world_size // count) == 0]
    if islands not in choices:
        raise UserError(
            f"islands is {islands}, and the {island_ranks} ranks of each are neither whole nodes of {counted(of_node, 'rank')} nor an "
            f"equal part of one; choose {any_of(choices)}, or pass `grid`"
        )
    return min(of_node, island_ranks)


def _check_options(options: EngineOptions) -> None:
    if not isinstance(options.policy, Policy):
        raise UserError(f"policy is {options.policy!r}; choose one of megatron_zpp.zero.policy, such as POLICIES[3] or ZEROPP")
    _check_adam(options.adam)
    if options.policy.optimizer is Rung.HOST and options.adam.backend == "apex":
        raise UserError("the backend of adam is 'apex', which has no AdamW for the host, where the policy keeps it; choose torch")
    if options.full_precision_iterations < 0:
        raise UserError(f"full_precision_iterations is {options.full_precision_iterations}; choose 0 or more")
    if options.dtype not in DTYPES:
        raise UserError(f"dtype {options.dtype} is not supported; choose {', '.join(map(str, DTYPES))}")
    if options.block_numel <= 0 or options.block_numel % BLOCK_NUMEL_MULTIPLE:
        raise UserError(f"block_numel is {options.block_numel}; choose a multiple of {BLOCK_NUMEL_MULTIPLE}")
    if min(options.prefetch.inter_uses, options.prefetch.intra_uses) < 0:
        raise UserError(f"{options.prefetch} is negative; choose 0 or more units ahead")
    if not options.clip_grad >= 0:
        raise UserError(f"clip_grad is {options.clip_grad}; choose a positive norm, or 0 for no clipping")


def _load_kernels(policy: Policy, device: torch.device) -> None:
    """Loads the kernels if they are built. Raises UserError if a GPU lacks those that the policy needs, and was not told to do without."""
    extension.load()
    codes = (policy.weight_codes, policy.gradient_codes)
    quantizes = any(not code.is_exact for links in codes for code in (links.inter, links.intra))
    if quantizes and device.type == "cuda" and not (extension.has_kernels_for("cuda") or extension.wants_reference(os.environ)):
        raise UserError(
            f"the policy quantizes and this GPU has no kernels for it: {extension.report('cuda')}, run where this rank runs. Or set "
            f"{extension.REFERENCE_VARIABLE}=1 on every rank to train without kernels"
        )


def _check_adam(adam: AdamOptions) -> None:
    if adam.backend not in ("torch", "apex"):
        raise UserError(f"the backend of adam is {adam.backend!r}; choose torch or apex")
    for name, beta in (("beta1", adam.beta1), ("beta2", adam.beta2)):
        if not 0 <= beta < 1:
            raise UserError(f"{name} of adam is {beta}; choose 0 or more, and less than 1")
    if not 0 < adam.eps < math.inf:
        raise UserError(f"eps of adam is {adam.eps}; choose a positive number")
    if not 0 <= adam.weight_decay < math.inf:
        raise UserError(f"weight_decay of adam is {adam.weight_decay}; choose a finite number, 0 or more")


def _check_loss_scaler(loss_scaler: LossScaler | None) -> None:
    if loss_scaler is not None and not 0 < loss_scaler.scale < math.inf:
        raise UserError(f"the scale of loss_scaler is {loss_scaler.scale}; choose a positive number")


def _device(module: nn.Module, backend: Backend | None) -> torch.device:
    if backend is not None:
        return torch.device("cpu")
    parameter = next(module.parameters(), None)
    if parameter is not None and not parameter.is_meta and not has_world():
        return parameter.device
    is_on_gpu = torch.cuda.is_available() and (not has_world() or "nccl" in str(dist.get_backend_config()))
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")


def _arguments_as_bytes(plan: ModulePlan, grid: Grid, options: EngineOptions, loss_scaler: LossScaler | None) -> bytes:
    """Everything that must be the same on all ranks, except the first values."""
    shapes = {
        path: (tuple(parameter.shape), parameter.dtype, parameter.is_meta, parameter.requires_grad)
        for path, parameter in plan.parameters.items()
    }
    scaler = None if loss_scaler is None else (type(loss_scaler).__name__, vars(loss_scaler))
    uses = tuple((use.module, use.units) for use in plan.uses)
    return repr((shapes, uses, grid, options.compared(), scaler)).encode()


def _fill(engine: ZeroEngine, first_values: Mapping[str, nn.Parameter], initialize: Initializer | None) -> bytes:
    """Writes the first values into the main weights. Returns a digest of those that `initialize` gave."""
    own = {piece.parameter: piece for piece in resting_pieces(engine) if piece.state == WEIGHT}
    digest = hashlib.blake2b()
    for placed in parameters(engine):
        path, shape = placed.spec.name, torch.Size(placed.spec.shape)
        values = initialize(path, shape) if initialize is not None else first_values[path]
        if values.shape != shape:
            raise UserError(f"initialize gave {list(values.shape)} values for parameter {path}, which has {list(shape)}")
        flat = values.detach().to(torch.float32).flatten()
        if initialize is not None:
            digest.update(digest_of([flat]))
        if path in own:
            own[path].values.copy_(flat[own[path].start : own[path].stop])
    engine.weights_changed()
    return digest.digest()


def _end(made: WorldLinks, remind: Callable[[], None]) -> None:
    made.end()
    atexit.unregister(remind)


def _remind_to_close(rank: int) -> None:
    """Says what is wrong with a program that ends before it has closed its engine, unless it ends in a traceback."""
    if not hasattr(sys, "last_type"):
        _log.warning(
            "rank %d: the program ends before engine.close(), so an error in weights gathered ahead would not be seen, and threads of the "
            "collectives may abort the process; end the program with engine.close(), then leave_world()",
            rank,
        )


def _tell(engine: ZeroEngine) -> None:
    """Says once per world what was sharded."""
    if engine.rank or not _log.isEnabledFor(logging.INFO):
        return
    of_units = [(unit.trains, sum(placed.numel for placed in unit.layout.params)) for unit in engine.units]
    grid, policy = engine.links.grid, engine.options.policy
    _log.info(
        "sharded %d parameters, of which %d are trained, in %s among %s on %s, %s per partition; they rest on the %s rung, in a step on "
        "the %s one, and cross links in %s bits between partitions and %s inside; gradients rest on the %s rung; kernels: %s",
        sum(numel for _, numel in of_units),
        sum(numel for trains, numel in of_units if trains),
        counted(len(of_units), "unit"),
        counted(grid.world_size, "rank"),
        counted(grid.nodes, "node"),
        grid.partition_ranks,
        policy.optimizer.name.lower(),
        policy.weights_in_step.name.lower(),
        *(code.bits or 8 * engine.options.dtype.itemsize for code in (policy.weight_codes.inter, policy.weight_codes.intra)),
        policy.gradients.name.lower(),
        "those that were built" if extension.has_kernels_for(engine.device.type) else "none, references stand in for them",
    )
