"""--dry-run: describes the run that the flags ask for, without starting it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_zpp.checkpoint.candidates import check_may_begin_anew
from megatron_zpp.config.batch_schedule import batch_schedule, length_in_samples, running_schedule
from megatron_zpp.config.counted import counted, in_gib
from megatron_zpp.config.data_sources import Blend, read_sources
from megatron_zpp.config.deepspeed import CONTEXT_FIELD, NOTHING, context_ranks
from megatron_zpp.config.defaults import banner
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.options import arguments_block
from megatron_zpp.config.resolve import resolve_in
from megatron_zpp.config.rules_schedule import check_batches
from megatron_zpp.config.schema import Config
from megatron_zpp.data.tokenizers.tokenizer import embedding_rows, tokenizer_of_run
from megatron_zpp.model.flops import hardware_flops, model_flops
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.training.hardware import GIGABYTE, TERA, planned_machine
from megatron_zpp.training.kept_rules import with_kept_rules
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.plan_words import islands_in_words, mfu, model_in_words, model_teraflops, rounded, tokens_per_second, wrapped
from megatron_zpp.training.sample_order import order_notices
from megatron_zpp.training.sharding import checkpoint_bytes, grid_of, sample_groups_of, saved_between_nodes, shape_of
from megatron_zpp.training.stored_run import StoredRun, find_stored_run, with_schedule

if TYPE_CHECKING:
    from megatron_zpp.training.plan.machine import Machine
    from megatron_zpp.training.run_plan import RunPlan

LABEL_COLUMNS = 24
SECONDS_PER_DAY = 86400


def described_plan(given: Config, launch: Launch) -> str:
    """The text that --dry-run prints: the flags, as a run prints them, and the plan. given: the configuration before `resolve`.

    Raises UserError for mistakes that would end the run at its start: in flags, tokenizer, corpora or checkpoint, or too little memory,
    if --memory-gigabytes is given.
    """
    config, world = _resolved(given, launch)
    stored = find_stored_run(config.checkpoint)
    if stored is not None:
        config, world = _resolved(replace(given, earlier_samples=stored.earlier_samples), launch)
    grid = grid_of(config, world.size)
    config, about_rules = with_kept_rules(with_schedule(config, stored, sample_groups_of(config, grid)), stored)
    vocab_size = tokenizer_of_run(config).vocab_size
    padded_vocab_size = embedding_rows(config.model, vocab_size)
    start, data = _start(config, grid, padded_vocab_size, stored), _data(config)
    plan = _planned(config, world, padded_vocab_size)
    parts = {
        "parameters": model_in_words(plan, vocab_size),
        "training": _training(plan),
        "data": data,
        "start": start,
        "sharding": " on ".join(filter(None, [plan.member.name, islands_in_words(plan)])),
        "memory per rank": f"{in_gib(plan.memory.total)}: {plan.memory}",
        "host memory per rank": _host(plan, world),
        "bytes per iteration": _bytes(plan),
        "operations": _operations(plan, world),
        "time": _time(given, plan, world),
        "checkpoint": _checkpoint(plan, world),
    }
    device = config.plan.device.upper()
    groups = _groups(config)
    nodes = f"{counted(world.nodes, 'node')} x {world.ranks_per_node}"
    headline = f"plan of {counted(world.size, 'rank')}{groups} ({nodes}, {device}); nothing was started"
    labelled = [f"  {name} {'.' * (LABEL_COLUMNS - len(name))} {text}" for name, text in parts.items() if text]
    notices = map(wrapped, [*config.notices, *about_rules, headline])
    lines = [wrapped(line, " " * (LABEL_COLUMNS + 4)) for line in labelled]
    return "\n".join(filter(None, [banner(config), arguments_block(config), *notices, *lines]))


def _groups(config: Config) -> str:
    """The ranks that share layers, and those that divide samples, in words; empty if there are none."""
    sizes = {
        "share layers": config.distributed.tensor_model_parallel_size,
        "divide samples": config.distributed.context_parallel_size,
    }
    groups = [f"{size} that {what}" for what, size in sizes.items() if size > 1]
    return f" as groups of {' and '.join(groups)}" if groups else ""


def planned_world_size(given: Config, launch: Launch, values: Mapping[str, int] = NOTHING) -> tuple[int, int | None]:
    """Ranks of the planned world, and ranks per node if known: by the flags, else by the launcher, else those of one sample.

    values: numbers of ranks that share layers or samples, in place of what flags and files say.
    Raises FlagError if the flags contradict each other, or do not say how many ranks a node has.
    """
    nodes, world_size, ranks_per_node = given.plan.nodes, given.plan.world_size, given.distributed.ranks_per_node
    if nodes is None and world_size is None:
        if launch.world_size > 1:
            launch.check_equal_nodes(ranks_per_node)
            return launch.world_size, launch.local_world_size
        asked = {"tensor_model_parallel_size": given.distributed.tensor_model_parallel_size, CONTEXT_FIELD: context_ranks(given)}
        group = math.prod({**asked, **values}.values())
        return ranks_per_node or group, ranks_per_node or (group if group > 1 else None)
    if world_size is None:
        if ranks_per_node is None:
            raise ranks_left_open(nodes or 1)
        return (nodes or 1) * ranks_per_node, ranks_per_node
    if nodes is not None and world_size % nodes != 0:
        raise FlagError(f"--nodes {nodes} does not divide --world-size {world_size}; correct one of them.")
    if nodes is not None and ranks_per_node not in (None, world_size // nodes):
        raise FlagError(f"--nodes {nodes} times --ranks-per-node {ranks_per_node} is not --world-size {world_size}; leave one of them out.")
    if nodes is None and ranks_per_node is None and world_size > 1:
        raise FlagError(f"--world-size {world_size} leaves open how many ranks a node has; give --nodes or --ranks-per-node as well.")
    return world_size, ranks_per_node or world_size // (nodes or 1)


def ranks_left_open(nodes: int) -> FlagError:
    """The error about nodes of an unknown number of ranks."""
    return FlagError(f"--nodes {nodes} leaves open how many ranks a node has; give --ranks-per-node as well.")


def _resolved(given: Config, launch: Launch) -> tuple[Config, PlannedWorld]:
    config = resolve_in(given, lambda values: planned_world_size(given, launch, values))
    ranks_per_node = config.distributed.ranks_per_node
    world_size, _ = planned_world_size(given, launch)
    return config, PlannedWorld(world_size // ranks_per_node, ranks_per_node, is_on_gpu=config.plan.device == "gpu")


def _planned(config: Config, world: PlannedWorld, padded_vocab_size: int) -> RunPlan:
    """The plan. Raises UserError if it needs more memory than the flags say that there is."""
    # These import torch, which takes seconds: mistakes in flags are found before.
    from megatron_zpp.training.memory_check import AvailableMemory, check_fits
    from megatron_zpp.training.run_plan import plan_as_given

    plan, assumed = plan_as_given(config, world, padded_vocab_size), config.plan
    available = AvailableMemory(_bytes_of(assumed.memory_gigabytes), _bytes_of(assumed.host_memory_gigabytes, world.ranks_per_node))
    if not available.holds(plan.memory):
        check_fits(config, padded_vocab_size, plan.grid, is_on_gpu=world.is_on_gpu, available=available)
    return plan


def _bytes_of(gigabytes: float | None, ranks: int = 1) -> int | None:
    return None if gigabytes is None else int(gigabytes * GIGABYTE) // ranks


def _host(plan: RunPlan, world: PlannedWorld) -> str:
    """What the host of a GPU holds, and how many threads update weights there; empty if there is nothing."""
    need = plan.memory
    if not plan.config.zero.optimizer_cpu_offload:
        if plan.config.model.checkpoint_in_cpu and not world.is_on_gpu:
            return "the device is the host, so --checkpoint-in-cpu moves nothing"
        return f"{in_gib(need.host)}: {need.on_host()}" if need.host else ""
    threads = f"AdamW has the cores of a node divided by {world.ranks_per_node}"
    if not world.is_on_gpu:
        return f"the device is the host, so --optimizer-cpu-offload moves nothing; {threads}"
    return f"{in_gib(need.host)}: {need.on_host()}; {in_gib(world.ranks_per_node * need.host)} per node; {threads}"


def _training(plan: RunPlan) -> str:
    config, training = plan.config, plan.config.training
    return (
        f"{counted(training.train_iters, 'iteration')} of {counted(training.global_batch_size, 'sample')} of "
        f"{counted(config.model.seq_length, 'token')}, "
        f"{_all_tokens(config):.4g} tokens in all; "
        f"per rank and iteration {plan.microbatches} x {counted(training.micro_batch_size, 'sample')}{_share_of_tokens(plan)}"
    )


def _share_of_tokens(plan: RunPlan) -> str:
    context_ranks = plan.grid.context_ranks
    return f", 1/{context_ranks} of the tokens of each" if context_ranks > 1 else ""


def _all_tokens(config: Config) -> int:
    training, lengths = config.training, config.sample_lengths
    return lengths.tokens_in(length_in_samples(training, batch_schedule(training, lengths)))


def _data(config: Config) -> str:
    """The corpora of each split, and how often training reads the same. Raises UserError if there is nothing to train on."""
    if config.data.mock_data:
        return "generated tokens"
    from megatron_zpp.data.repetition import repetition
    from megatron_zpp.data.split_corpora import SplitCorpora, SplitCorpus  # imports numpy

    sources, seq_length = read_sources(config.data), config.model.seq_length
    corpora = SplitCorpora(sources, config.data.split, lambda prefix, split: SplitCorpus(prefix, split, seq_length))
    used, _ = corpora.used_for_training()
    tokens = {prefix: corpus.source.token_count for prefix, corpus in corpora.by_prefix.items()}
    parts = [f"{split} {_blend(blend, tokens)}".strip() for split, blend in sources.blends.items()]
    return "; ".join([*parts, *repetition(used, _all_tokens(config) // seq_length, seq_length)])


def _blend(blend: Blend, tokens: Mapping[str, int]) -> str:
    return f"{counted(len(blend.prefixes), 'corpus', 'corpora')} of {sum(tokens[prefix] for prefix in blend.prefixes):.4g} tokens"


def _start(config: Config, grid: Grid, padded_vocab_size: int, stored: StoredRun | None) -> str:
    """The checkpoint that the run loads; empty if no flag asks for one. Raises UserError if the run could not start from it."""
    checkpoint = config.checkpoint
    if checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        return ""
    sample_groups = sample_groups_of(config, grid)
    if stored is None:
        check_may_begin_anew(checkpoint)
        check_batches(config, running_schedule(config, sample_groups), 0)
        return "anew, there is no checkpoint yet"
    stored.check_contents(config, shape_of(config, padded_vocab_size).unit_specs())
    check_batches(config, running_schedule(config, sample_groups), stored.consumed_samples)
    return "; ".join([f"from {stored.folder}", *stored.notices(config), *order_notices(config, stored)])


def _bytes(plan: RunPlan) -> str:
    weights, gradients = (plan.grid.into_node(part.inter_bytes) / GIGABYTE for part in (plan.weights, plan.gradients))
    return (
        f"{plan.node_bytes / GIGABYTE:.4g} GB into a node from others (weights {weights:.4g}, gradients {gradients:.4g}), "
        f"{_outer_bytes(plan)}"
        f"{plan.rank_bytes / GIGABYTE:.4g} GB into a rank inside its node, "
        f"{_tensor_bytes(plan)}{_context_bytes(plan)}{counted(plan.step.collectives, 'collective')}"
    )


def _outer_bytes(plan: RunPlan) -> str:
    """What outer steps bring; empty without them."""
    if not plan.config.diloco.has_islands:
        return ""
    average, most, of_means = (n / GIGABYTE for n in (plan.outer_node_bytes, plan.outer_most_bytes, plan.mean_node_bytes))
    start = plan.config.diloco.diloco_start_iteration
    at_first = f" ({of_means:.4g} in each until iteration {start})" if start else ""
    return f"outer steps {average:.4g} GB into a node from other islands on average, {most:.4g} at most{at_first}, "


def _tensor_bytes(plan: RunPlan) -> str:
    return f"{plan.tensor_bytes / GIGABYTE:.4g} GB into a rank over the tensor link, " if plan.grid.tensor_ranks > 1 else ""


def _context_bytes(plan: RunPlan) -> str:
    """What comes over the context link; empty if there is none."""
    if plan.grid.context_ranks == 1:
        return ""
    between = plan.exchanged_node_bytes
    into_node = f" ({between / GIGABYTE:.4g} GB into a node from others)" if between else ""
    return f"{plan.exchanges.context_bytes / GIGABYTE:.4g} GB into a rank over the context link{into_node}, "


def _operations(plan: RunPlan, world: PlannedWorld) -> str:
    model, training, vocabulary = plan.config.model, plan.config.training, plan.padded_vocab_size
    required = model_flops(model, vocabulary, training.global_batch_size)
    made = hardware_flops(
        model,
        vocabulary,
        training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        context_ranks=plan.grid.context_ranks,
    )
    counts = [count / world.size / TERA for count in (required, made)]
    return "{:.4g} TFLOP per rank and iteration (model), {:.4g} with recomputation and whole attention (hardware)".format(*counts)


def _time(given: Config, plan: RunPlan, world: PlannedWorld) -> str:
    """Time of an iteration and of the run; empty without --teraflops. given: the configuration before `resolve`."""
    assumed = plan.config.plan
    if assumed.teraflops is None:
        return ""
    flops_per_second = assumed.teraflops * TERA
    if world.nodes > 1 and assumed.inter_gigabits is None:
        seconds = plan.step.flops / flops_per_second
        return f"{_speed(plan, world, seconds)}; without the link between nodes, whose rate --inter-gigabits says"

    def machine_at(gigabits: float) -> Machine:
        intra, milliseconds = assumed.intra_gigabytes, assumed.inter_milliseconds
        return planned_machine(gigabits, intra, flops_per_second, is_on_gpu=world.is_on_gpu, inter_milliseconds=milliseconds)

    machine = machine_at(assumed.inter_gigabits or float("inf"))  # one node has no such link
    time = plan.time(machine)
    busy = ", ".join(f"{name} {seconds / time.seconds:.0%}" for name, seconds in time.busy.items())
    start = plan.config.diloco.diloco_start_iteration
    speed = _speed(plan, world, time.seconds, plan.time(machine, takes_means=True).seconds if start else None)
    return f"{speed}; busy are {busy}{_without_islands(given, plan, world, machine_at)}"


def _without_islands(given: Config, plan: RunPlan, world: PlannedWorld, machine_at: Callable[[float], Machine]) -> str:
    """From which rate of the link between nodes on islands gain nothing; empty without islands, and if no rate is fast enough."""
    from megatron_zpp.training.run_plan import enough_without_islands  # imports torch

    enough = enough_without_islands(given, plan, world, machine_at) if plan.islands > 1 else None
    if enough is None:
        return ""
    rate, other = enough
    return f"; from about {rounded(rate, 2)} Gbit/s on a run without islands ({other.flags}) is as fast, and learns more per token"


def _speed(plan: RunPlan, world: PlannedWorld, seconds: float, seconds_of_means: float | None = None) -> str:
    """seconds_of_means: of an iteration after which islands take means; None if none does, or links take no time."""
    iterations = _all_tokens(plan.config) / (plan.config.training.global_batch_size * plan.config.model.seq_length)
    whole, at_first = iterations * seconds, ""
    if seconds_of_means is not None:
        start = plan.config.diloco.diloco_start_iteration or 0
        whole += min(start, iterations) * (seconds_of_means - seconds)
        at_first = f" ({seconds_of_means:.4g} s in each until iteration {start})"
    length = f"{whole / SECONDS_PER_DAY:.4g} days" if whole > SECONDS_PER_DAY else f"{whole:.4g} s"
    speed, share = tokens_per_second(plan, seconds), mfu(plan, seconds)
    of_peak = "" if share is None else f", MFU {share:.1%} of {plan.config.logging.device_peak_tflops:g} TFLOP/s"
    return (
        f"{seconds:.4g} s per iteration{at_first}, {length} in all, "
        f"{rounded(speed)} tokens per second ({rounded(speed / world.size)} per rank), "
        f"{model_teraflops(plan, seconds):.4g} TFLOP/s per rank (model){of_peak}"
    )


def _checkpoint(plan: RunPlan, world: PlannedWorld) -> str:
    """Bytes of a checkpoint, on each disk, and those that a save sends between nodes; empty without --save."""
    if plan.config.checkpoint.save is None:
        return ""
    whole = checkpoint_bytes(plan.config, plan.grid, plan.padded_vocab_size)
    each = f"{whole / GIGABYTE:.4g} GB each"
    if world.nodes == 1:
        return each
    crossing = saved_between_nodes(plan.config, plan.grid, plan.padded_vocab_size)
    rate, copies = plan.config.plan.inter_gigabits, plan.config.checkpoint.save_copies
    seconds = "" if rate is None else f", in {crossing * 8 / (rate * GIGABYTE):.4g} s"
    if plan.config.checkpoint.node_local_checkpoints:
        each += f", {whole * copies / world.nodes / GIGABYTE:.4g} GB on the disk of each node"
        if copies == 1:
            return f"{each}; a save sends none of them between nodes"
        return f"{each} with copies; a save sends {crossing / GIGABYTE:.4g} GB into each node{seconds}"
    return (
        f"{each}; if one of the nodes has the disk, a save sends {crossing / GIGABYTE:.4g} GB between nodes{seconds} "
        "(none with --node-local-checkpoints)"
    )
