"""Plans a run before it is started: memory per rank, bytes per link and time per iteration, for every member of the ZeRO family.

    python tools/plan_run.py --nodes 24 --inter-gigabits 100 400 --teraflops 40 --memory-gigabytes 32 -- \\
        --num-layers 40 --hidden-size 6144 --num-attention-heads 32 --seq-length 1024 --ranks-per-node 16 --fp16 --checkpoint-activations

Flags after `--` are the training script's. Of the ZeRO flags only the details count (bits, block, partition), because
the plan compares all stages and features. A member of the family whose code does not have the given number of bits keeps its default.
The plan is pure arithmetic and takes a few seconds for any size of cluster; torch is not imported. docs/slow_links.md lists the assumptions
of the time model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command import errors_in_words, rank_count, show_usage_for_help_only

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.counted import counted
from megatron_zpp.config.defaults import assume
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.groups.data import TOKENIZER_FILES
from megatron_zpp.config.schema import Config
from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer, embedding_rows
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.monitor.output_file import naming_file
from megatron_zpp.training.dry_run import ranks_left_open
from megatron_zpp.training.hardware import GIGABYTE, TERA, planned_machine
from megatron_zpp.training.memory_need import in_gib
from megatron_zpp.training.run_plan import (
    MEMBERS,
    PlannedWorld,
    RunPlan,
    computation_by_rate,
    computation_by_step,
    plan_run,
)
from megatron_zpp.zero.plan.time_model import Computation, Machine, Overlap, StepTime

NULL_VOCABULARY = 50257  # ids of mock data, see config/defaults.py
ZEROPP = "ZeRO++"
TRAFFIC_HEADER = ("GB into a node", "GB into a rank inside its node")
TENSOR_HEADER = "GB into a rank over the tensor link"
CONTEXT_HEADER = "GB into a rank over the context link"
TENSOR_SIZES = (1, 2, 4, 8)
CONTEXT_SIZES = (1, 2, 4, 8, 16)
GROUP_NODES = 2  # the most nodes of a group of these sizes
COMPARED = tuple(member for member in MEMBERS if member.name in ("ZeRO-1", "ZeRO-3", ZEROPP))  # for each of these sizes
WORTHWHILE = 1.03  # a feature with a smaller gain is not recommended


class Sizes(NamedTuple):
    """How many ranks share layers, and how many divide samples."""

    tensor: int
    context: int


class Rate(NamedTuple):
    """The estimates at one rate of the link between nodes: of all members, and of the best of COMPARED for some sizes of groups."""

    members: list[Estimate]
    by_size: dict[Sizes, Estimate]


@dataclass(frozen=True)
class Estimate:
    """One member of the family at one rate of the link between nodes. bound_by: the part of the machine that is busy longest."""

    plan: RunPlan
    gigabits: float
    time: StepTime
    fits: bool

    @property
    def bound_by(self) -> str:
        busy = self.time.busy
        return max(busy, key=lambda part: busy[part])

    @property
    def waits_for_other_nodes(self) -> bool:
        """Whether the link between nodes is busy longest."""
        return self.time.inter_link == max(self.time.busy.values())


def main() -> None:
    parser = _parser()
    options, flags = _split(parser, sys.argv[1:])
    with errors_in_words(parser):
        run(options, flags)


def run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Prints the plan. Raises ValueError for flags that no run could have."""
    given = with_checkpoint_args(parse_flags(flags))
    if given.distributed.ranks_per_node is None:
        raise ranks_left_open(options.nodes)
    world = PlannedWorld(options.nodes, given.distributed.ranks_per_node, is_on_gpu=options.device == "gpu")
    padded = embedding_rows(given.model, _vocab_size(given))
    plans, left_out = _plans(given, world, padded)
    zero3 = next(plan for plan in plans if plan.member.name == "ZeRO-3")
    computation = _computation(options, zero3, padded)
    by_size = _by_size(options, given, world, plans)
    by_rate = {
        gigabits: Rate([_estimate(plan, gigabits, computation, options) for plan in plans], by_size.get(gigabits, {}))
        for gigabits in options.inter_gigabits
    }
    print("\n".join([_text(world, zero3, padded, computation, by_rate), *left_out]))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with naming_file(options.output):
            options.output.write_text(json.dumps(_as_json(world, by_rate), indent=1) + "\n")


def _by_size(
    options: argparse.Namespace, given: Config, world: PlannedWorld, as_given: list[RunPlan]
) -> dict[float, dict[Sizes, Estimate]]:
    """For each rate, the best of some members for the sizes that groups of ranks could have; empty if only those that are given could.

    as_given: the plans with the given sizes, whose global batch all have.
    """
    one, found = as_given[0], {gigabits: dict[Sizes, Estimate]() for gigabits in options.inter_gigabits}
    own = [plan for plan in as_given if plan.member in COMPARED]
    for sizes in _sizes(one):
        try:
            plans = own if sizes == _sizes_of(one) else _compared(_with_sizes(given, sizes, one), world, one)
        except ValueError:
            continue  # a rule forbids these sizes, or the batch does not divide among the groups that are left
        computation = _computation(options, plans[0], one.padded_vocab_size)
        for gigabits, estimates in found.items():
            estimates[sizes] = _best([_estimate(plan, gigabits, computation, options) for plan in plans])
    return {gigabits: estimates for gigabits, estimates in found.items() if len(estimates) > 1}


def _sizes_of(plan: RunPlan) -> Sizes:
    return Sizes(plan.job.grid.tensor_ranks, plan.job.grid.context_ranks)


def _sizes(plan: RunPlan) -> list[Sizes]:
    """The sizes to compare with those of the plan, which are among them."""
    most = GROUP_NODES * plan.job.grid.ranks_per_node
    sizes = {Sizes(tensor, context) for tensor in TENSOR_SIZES for context in CONTEXT_SIZES if tensor * context <= most}
    return sorted({*sizes, _sizes_of(plan)})


def _compared(given: Config, world: PlannedWorld, other: RunPlan) -> list[RunPlan]:
    return [plan_run(given, member, world, other.padded_vocab_size) for member in COMPARED]


def _with_sizes(given: Config, sizes: Sizes, other: RunPlan) -> Config:
    """The configuration with groups of these sizes, and the global batch of the other plan."""
    training = given.training
    if training.global_batch_size is None and training.step_batch_size_schedule is None:
        given = given.with_values(global_batch_size=other.config.training.global_batch_size)
    return given.with_values(tensor_model_parallel_size=sizes.tensor, context_parallel_size=sizes.context)


def _best(estimates: Sequence[Estimate]) -> Estimate:
    """The fastest of those that fit; the smallest if none does."""
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return min(estimates, key=lambda estimate: estimate.plan.memory.total)
    return min(fitting, key=lambda estimate: estimate.time.seconds)


def _plans(given: Config, world: PlannedWorld, padded: int) -> tuple[list[RunPlan], list[str]]:
    """The plans of all members, and a line if lean is not among them because a flag contradicts it."""
    plans, left_out = [], []
    for member in MEMBERS:
        try:
            plans.append(plan_run(given, member, world, padded))
        except FlagError as error:
            if not member.is_lean:
                raise
            left_out.append(f"{member.name} is left out: {error}")
    return plans, left_out


def _estimate(plan: RunPlan, gigabits: float, computation: Computation, options: argparse.Namespace) -> Estimate:
    ranks = plan.job.grid.ranks_per_node
    fits = options.memory_gigabytes is None or plan.memory.total <= options.memory_gigabytes * GIGABYTE
    fits &= options.host_memory_gigabytes is None or ranks * plan.memory.host <= options.host_memory_gigabytes * GIGABYTE
    return Estimate(plan, gigabits, plan.time(_machine(gigabits, options), computation), fits)


def _machine(gigabits: float, options: argparse.Namespace) -> Machine:
    overlap = Overlap(options.overlap) if options.overlap else None
    is_on_gpu = options.device == "gpu"
    return planned_machine(gigabits * options.link_efficiency, options.intra_gigabytes, is_on_gpu=is_on_gpu, overlap=overlap)


def _computation(options: argparse.Namespace, zero3: RunPlan, padded: int) -> Computation:
    if options.step_seconds is not None:
        return computation_by_step(zero3.config, padded, options.step_seconds, zero3.job.microbatches)
    return computation_by_rate(zero3.config, padded, options.teraflops * TERA)


def recommended(estimates: Sequence[Estimate]) -> Estimate | None:
    """Among the members that fit and are at most WORTHWHILE times slower than the fastest, the one with the fewest features.

    Lean, whose codes have the fewest bits, counts only if the best of the others waits for other nodes. None if no member fits.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    others = [estimate for estimate in fitting if not estimate.plan.member.is_lean]
    best = _simplest(others or fitting)
    return _simplest(fitting) if best is not None and best.waits_for_other_nodes else best


def _simplest(estimates: Sequence[Estimate]) -> Estimate | None:
    """The one with the fewest features among those that are almost as fast as the fastest; None if there is none."""
    if not estimates:
        return None
    shortest = min(estimate.time.seconds for estimate in estimates)
    good = [estimate for estimate in estimates if estimate.time.seconds <= WORTHWHILE * shortest]
    return min(good, key=lambda estimate: (estimate.plan.member.features, estimate.plan.memory.total))


def _vocab_size(given: Config) -> int:
    """The ids of the tokenizer if its files are given."""
    data = assume(given).data
    if any(getattr(data, name) is not None for name in TOKENIZER_FILES):
        return build_tokenizer(data).vocab_size
    return data.vocab_size or NULL_VOCABULARY


def _text(world: PlannedWorld, zero3: RunPlan, padded: int, computation: Computation, by_rate: dict[float, Rate]) -> str:
    microbatches = zero3.job.microbatches
    seconds = computation.seconds * microbatches
    parameters = parameter_count(zero3.config.model, padded)
    lines = [
        f"{parameters / 1e9:.3g} billion parameters on {counted(world.nodes, 'node')} x {counted(world.ranks_per_node, 'rank')}, "
        f"{counted(microbatches, 'micro-batch', 'micro-batches')} of "
        f"{zero3.config.training.micro_batch_size} per rank and iteration{_groups(zero3)}, {seconds:.4g} s of computation per iteration",
        "",
        *_memory_table(next(iter(by_rate.values())).members),
        *_about_host(world, zero3),
    ]
    for gigabits, rate in by_rate.items():
        lines += ["", f"Link of a node: {gigabits:g} Gbit/s in each direction", "", *_time_table(rate.members), ""]
        lines += [*_size_table(rate.by_size), _advice(rate.members)]
    return "\n".join(lines)


def _groups(plan: RunPlan) -> str:
    sizes = _sizes_of(plan)
    groups = [f"{sizes.tensor} ranks share layers and samples"] * (sizes.tensor > 1)
    groups += [f"{sizes.context} divide the tokens of a sample"] * (sizes.context > 1)
    return f" ({', '.join(groups)})" if groups else ""


def _size_table(by_size: dict[Sizes, Estimate]) -> list[str]:
    """One line for each pair of sizes that groups could have; none if there is only one."""
    if not by_size:
        return []
    header = ["--tensor-model-parallel-size", "--context-parallel-size", "member", "micro-batches", *TRAFFIC_HEADER]
    header += [TENSOR_HEADER, CONTEXT_HEADER]
    header += ["memory per rank", "fits", "s per iteration"]
    rows = [
        [
            *map(str, sizes),
            estimate.plan.member.name,
            str(estimate.plan.job.microbatches),
            *_traffic_cells(estimate.plan),
            *_group_cells(estimate.plan, Sizes(2, 2)),
            in_gib(estimate.plan.memory.total),
            "yes" if estimate.fits else "no",
            f"{estimate.time.seconds:.4g}",
        ]
        for sizes, estimate in by_size.items()
    ]
    return [*_table(header, rows), ""]


def _traffic_cells(plan: RunPlan) -> list[str]:
    return [f"{plan.node_bytes / GIGABYTE:.4g}", f"{plan.traffic.total.intra_bytes / GIGABYTE:.4g}"]


def _group_cells(plan: RunPlan, sizes: Sizes) -> list[str]:
    """What comes over the tensor link and the context link, each if groups of these sizes have one."""
    tensor = [f"{plan.tensor_bytes / GIGABYTE:.4g}"] * (sizes.tensor > 1)
    return tensor + [f"{plan.context_traffic.context_bytes / GIGABYTE:.4g}"] * (sizes.context > 1)


def _memory_table(estimates: Sequence[Estimate]) -> list[str]:
    has_host = any(estimate.plan.memory.host for estimate in estimates)
    header = [
        "memory per rank",
        "weights",
        "gradients",
        "optimizer",
        "secondary copy",
        "gathered",
        "buffers",
        "activations",
        "saving",
        "GPU itself",
        "total",
        *(["host"] if has_host else []),
        "fits",
    ]
    rows = []
    for estimate in estimates:
        plan, need = estimate.plan.memory.plan, estimate.plan.memory
        parts = (
            need.weights,
            plan.gradients,
            need.optimizer_state,
            plan.secondary,
            need.gathered,
            plan.buffers + plan.means,
            need.activations,
            need.save_copy_on_device,
            need.device.total,
            need.total,
            *([need.host] if has_host else []),
        )
        rows.append([estimate.plan.member.name, *map(in_gib, parts), "yes" if estimate.fits else "no"])
    return _table(header, rows)


def _about_host(world: PlannedWorld, zero3: RunPlan) -> list[str]:
    """A line about an optimizer on the host; empty if it is on the device."""
    if not zero3.config.zero.optimizer_cpu_offload:
        return []
    if not world.is_on_gpu:
        return ["", "--optimizer-cpu-offload: the device is the host, so nothing is moved."]
    ranks = world.ranks_per_node
    return ["", f"--optimizer-cpu-offload: on the host AdamW has the cores of a node divided by {ranks}; stage 0 stays on the device."]


def _time_table(estimates: Sequence[Estimate]) -> list[str]:
    sizes = _sizes_of(estimates[0].plan)
    links = [TENSOR_HEADER] * (sizes.tensor > 1) + [CONTEXT_HEADER] * (sizes.context > 1)
    header = ["", *TRAFFIC_HEADER, *links, "collectives", "s per iteration", "x ZeRO-3", "busy longest"]
    zero3 = next(estimate.time.seconds for estimate in estimates if estimate.plan.member.name == "ZeRO-3")
    rows = [
        [
            estimate.plan.member.name,
            *_traffic_cells(estimate.plan),
            *_group_cells(estimate.plan, sizes),
            str(estimate.plan.collectives),
            f"{estimate.time.seconds:.4g}",
            f"{zero3 / estimate.time.seconds:.2f}",
            estimate.bound_by,
        ]
        for estimate in estimates
    ]
    return _table(header, rows)


def _advice(estimates: Sequence[Estimate]) -> str:
    choice = recommended(estimates)
    if choice is None:
        levers = "more nodes, --checkpoint-activations, a smaller --micro-batch-size, or a larger --context-parallel-size for long samples"
        return f"Recommended: none of these fits; take {levers}."
    member, time = choice.plan.member, choice.time.seconds
    fitting = [estimate for estimate in estimates if estimate.fits]
    fastest = min(fitting, key=lambda estimate: estimate.time.seconds)
    gain = "simpler" if member.features < fastest.plan.member.features else "in less memory"
    why = (
        "the fastest that fits" if fastest is choice else f"{time / fastest.time.seconds - 1:.1%} behind {fastest.plan.member.name}, {gain}"
    )
    price = _price_of_lean(choice, estimates) if member.is_lean else ""
    return f"Recommended: {choice.plan.flags} ({member.name}, {why}){price}"


def _price_of_lean(lean: Estimate, estimates: Sequence[Estimate]) -> str:
    """A line with what lean costs beside ZeRO++."""
    other = next(estimate for estimate in estimates if estimate.plan.member.name == ZEROPP)
    more = lean.plan.memory.total - other.plan.memory.total
    own, others = lean.plan.memory.plan, other.plan.memory.plan
    parts = {
        "weights": (own.weights, others.weights),
        "gradients": (own.gradients, others.gradients),
        "secondary copy": (own.secondary, others.secondary),
        "buffers": (own.buffers, others.buffers),
    }
    words = [f"{name} {in_gib(here)} instead of {in_gib(there)}" for name, (here, there) in parts.items() if here != there]
    difference = f"{in_gib(abs(more))} {'more' if more > 0 else 'less'} memory per rank than {ZEROPP}"
    slower = other.time.seconds / lean.time.seconds
    return (
        f"\nIts price: {difference} ({', '.join(words)}), and fewer bits per value. {ZEROPP} takes {slower:.2f} times as long; "
        "compare the loss of both on your model."
    )


def _as_json(world: PlannedWorld, by_rate: dict[float, Rate]) -> dict[str, Any]:
    return {
        "nodes": world.nodes,
        "ranks_per_node": world.ranks_per_node,
        "rates": [
            {
                "inter_gigabits": gigabits,
                "recommended": None if (choice := recommended(rate.members)) is None else choice.plan.member.name,
                "members": {estimate.plan.member.name: _member_json(estimate) for estimate in rate.members},
                "sizes": [
                    {"tensor_model_parallel_size": tensor, "context_parallel_size": context, **_member_json(estimate)}
                    for (tensor, context), estimate in rate.by_size.items()
                ],
            }
            for gigabits, rate in by_rate.items()
        ],
    }


def _member_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "memory_bytes": estimate.plan.memory.total,
        "host_bytes": estimate.plan.memory.host,
        "fits": estimate.fits,
        "inter_node_bytes": estimate.plan.node_bytes,
        "intra_node_bytes": estimate.plan.traffic.total.intra_bytes,
        "tensor_link_bytes": estimate.plan.tensor_bytes,
        "context_link_bytes": estimate.plan.context_traffic.context_bytes,
        "context_inter_node_bytes": estimate.plan.job.grid.into_node(estimate.plan.context_traffic.context_inter_bytes),
        "seconds": estimate.time.seconds,
    }


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in [header, rule, *rows]]


def _split(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this tool, and the flags of the training script: those after `--`; without `--`, those unknown to this tool."""
    show_usage_for_help_only(parser, arguments)
    if "--" in arguments:
        at = list(arguments).index("--")
        return parser.parse_args(arguments[:at]), list(arguments[at + 1 :])
    options, flags = parser.parse_known_args(arguments)
    return options, flags


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive; give a positive number")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plan_run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--nodes",
        type=rank_count,
        required=True,
        help="number of machines; --ranks-per-node among the training script's flags gives the ranks of each",
    )
    add("--inter-gigabits", type=_positive, nargs="+", required=True, metavar="X", help="rates of a node's link to the others, Gbit/s")
    add(
        "--intra-gigabytes",
        type=_positive,
        default=100.0,
        metavar="X",
        help="rate at which one rank receives inside its node, GB/s (default: %(default)s)",
    )
    speed = parser.add_mutually_exclusive_group(required=True)
    speed.add_argument(
        "--teraflops", type=_positive, metavar="X", help="speed that a rank sustains while it computes, with recomputation counted"
    )
    speed.add_argument("--step-seconds", type=_positive, metavar="X", help="measured time of an iteration that links do not slow down")
    add("--memory-gigabytes", type=_positive, metavar="X", help="memory that a rank may use; without it everything fits")
    add(
        "--host-memory-gigabytes",
        type=_positive,
        metavar="X",
        help="memory of a node's host, which its ranks share; without it everything fits",
    )
    add("--device", choices=("gpu", "cpu"), default="gpu", help="decides codec speed, latencies and overlap (default: %(default)s)")
    add("--link-efficiency", type=_positive, default=1.0, metavar="X", help="share of the link's rate that collectives reach (default: 1)")
    add(
        "--overlap",
        choices=[overlap.value for overlap in Overlap],
        help="what runs beside computation (default: streams on gpu, else thread)",
    )
    add("--output", type=Path, metavar="JSON", help="file to write the same figures to")
    return parser


if __name__ == "__main__":
    main()
