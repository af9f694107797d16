"""Plans a run before it is started: memory per rank, bytes per link and time per iteration, for every member of the ZeRO family.

    python tools/plan_run.py --nodes 24 --inter-gigabits 100 400 --teraflops 40 --memory-gigabytes 32 -- \\
        --num-layers 40 --hidden-size 6144 --num-attention-heads 32 --seq-length 1024 --ranks-per-node 16 --fp16 --checkpoint-activations

Flags after `--` are the training script's. Of the ZeRO flags only the details count (bits, block, partition), because
the plan compares all stages and features. A member of the family whose code does not have the given number of bits keeps its default.
Each plan is a real step of one rank on a machine that computes nothing, and all take seconds to a minute for any size of cluster.
docs/slow_links.md lists the assumptions about time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from cli.command import errors_in_words, parsed, parsed_with_flags_of_run, rank_count
from planning.estimates import Estimate, Rate, Sizes, sizes_of
from tqdm import tqdm

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.defaults import MOCK_VOCAB_SIZE, assume
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.groups.data import TOKENIZER_FILES
from megatron_zpp.config.schema import Config
from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer, embedding_rows
from megatron_zpp.system.output_file import naming_file
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.dry_run import ranks_left_open
from megatron_zpp.training.hardware import GIGABYTE, TERA, planned_machine
from megatron_zpp.training.members import MEMBERS, Member, PlannedWorld, config_of
from megatron_zpp.training.plan.machine import Machine, Overlap
from megatron_zpp.training.plan_words import wrapped

if TYPE_CHECKING:
    from megatron_zpp.training.run_plan import RunPlan

TENSOR_SIZES = (1, 2, 4, 8)
CONTEXT_SIZES = (1, 2, 4, 8, 16)
MOST_PROCESSES = 16
GROUP_NODES = 2  # the most nodes of a group of these sizes
ZERO_3 = next(member for member in MEMBERS if member.name == "ZeRO-3")
COMPARED = tuple(member for member in MEMBERS if member.name in ("ZeRO-1", "ZeRO-3", "ZeRO++", "lean-1", "lean"))  # for other sizes


def main() -> None:
    parser = _parser()
    options, flags = _split(parser, sys.argv[1:])
    with errors_in_words(parser):
        run(options, flags)


def run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Prints the plan. Raises UserError for flags that no run could have."""
    options.inter_gigabits = _rates(options)
    given = with_checkpoint_args(parse_flags(flags))
    if not given.data.names_corpora:
        given = given.with_values(mock_data=True)  # a plan needs none, not even for a tokenizer of texts
    if given.distributed.ranks_per_node is None:
        raise ranks_left_open(options.nodes)
    world = PlannedWorld(options.nodes, given.distributed.ranks_per_node, is_on_gpu=options.device == "gpu")
    vocab_size = _vocab_size(given)
    padded = embedding_rows(given.model, vocab_size)
    configs, left_out = _configs(given, MEMBERS, world)
    runs = _runs(given, world, configs, padded)
    # These import torch, which takes seconds: mistakes in flags are found before.
    from planning.tables import plan_as_json, plan_as_text

    by_rate = dict(zip(options.inter_gigabits, map(_rate, _estimated(runs, world, padded, options)), strict=True))
    zero3 = next(estimate.plan for estimate in by_rate[options.inter_gigabits[0]].as_given if estimate.plan.member == ZERO_3)
    flops_per_second = _flops_per_second(options, zero3)
    print("\n".join([plan_as_text(world, zero3, vocab_size, flops_per_second, by_rate), *map(wrapped, left_out)]))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with naming_file(options.output):
            options.output.write_text(json.dumps(plan_as_json(world, by_rate), indent=1) + "\n")


def _rates(options: argparse.Namespace) -> list[float]:
    """In Gbit/s. One node has no link to others, so nothing would cross it at any rate."""
    if options.inter_gigabits is None and options.nodes > 1:
        raise UserError("--inter-gigabits is missing: the rates of a node's link to the others in Gbit/s; give one or several.")
    return options.inter_gigabits or [float("inf")]


def _runs(given: Config, world: PlannedWorld, as_given: dict[Member, Config], padded: int) -> list[tuple[Config, Member]]:
    """The runs with each of the sizes that groups of ranks could have, first those with the given sizes, which are of all members.

    All have the global batch of the given sizes.
    """
    one = next(iter(as_given.values()))
    found = [as_given]
    for sizes in _other_sizes(one, padded):
        try:
            found.append(_configs(_with_sizes(given, sizes, one), COMPARED, world)[0])
        except FlagError:
            continue  # a rule forbids these sizes, or the batch does not divide among the groups that are left
    return [(config, member) for of_size in found for member, config in of_size.items()]


def _other_sizes(config: Config, padded: int) -> list[Sizes]:
    """The sizes to compare with those of the configuration."""
    most = GROUP_NODES * config.distributed.ranks_per_node
    tensor_sizes = [tensor for tensor in TENSOR_SIZES if padded % tensor == 0]
    sizes = [Sizes(tensor, context) for tensor in tensor_sizes for context in CONTEXT_SIZES if tensor * context <= most]
    return [some for some in sizes if some != sizes_of(config)]


def _with_sizes(given: Config, sizes: Sizes, other: Config) -> Config:
    """The configuration with groups of these sizes, and the global batch of the other one."""
    training = given.training
    if training.global_batch_size is None and training.step_batch_size_schedule is None:
        given = given.with_values(global_batch_size=other.training.global_batch_size)
    return given.with_values(tensor_model_parallel_size=sizes.tensor, context_parallel_size=sizes.context)


def _configs(given: Config, members: Sequence[Member], world: PlannedWorld) -> tuple[dict[Member, Config], list[str]]:
    """The configurations of these members, and a line for each reason why some are not among them.

    Those are left out that a flag contradicts: lean, and with islands all but ZeRO-3, to which others are compared.
    """
    has_islands = given.diloco.has_islands
    configs, left_out = dict[Member, Config](), dict[str, list[str]]()
    for member in members:
        try:
            configs[member] = config_of(given, member, world)
        except FlagError as error:
            if not (member.is_lean or (has_islands and member != ZERO_3)):
                raise
            left_out.setdefault(str(error), []).append(member.name)
    return configs, [f"Left out: {', '.join(names)}: {reason}" for reason, names in left_out.items()]


def _estimated(
    runs: Sequence[tuple[Config, Member]], world: PlannedWorld, padded: int, options: argparse.Namespace
) -> list[tuple[Estimate, ...]]:
    """For each rate, the estimates of all runs. Every processor plans some of them."""
    import megatron_zpp.training.run_plan  # noqa: F401  before processes are forked, which would import it each
    from megatron_zpp.data.preprocess.encoding_workers import follow_parent
    from megatron_zpp.training.host_threads import own_cores

    if any(config.model.recompute_granularity is not None for config, _ in runs):
        import torch._dynamo  # noqa: F401  as recomputation does

    with ProcessPoolExecutor(min(len(own_cores()), len(runs), MOST_PROCESSES), get_context("fork"), follow_parent) as pool:
        futures = [pool.submit(_estimates, config, member, world, padded, options) for config, member in runs]
        try:
            # The bar is for terminals alone.
            found = [future.result() for future in tqdm(futures, unit="plan", delay=2, leave=False, disable=None)]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return list(zip(*found, strict=True))


def _estimates(config: Config, member: Member, world: PlannedWorld, padded: int, options: argparse.Namespace) -> list[Estimate]:
    """Of one run, at each rate."""
    from megatron_zpp.training.run_plan import plan_member

    plan = plan_member(config, member, world, padded)
    machines = [_machine(gigabits, _flops_per_second(options, plan), options) for gigabits in options.inter_gigabits]
    return [Estimate(plan, plan.time(machine), _fits(plan, options)) for machine in machines]


def _rate(estimates: Sequence[Estimate]) -> Rate:
    """Of the estimates at one rate, those of the given sizes first."""
    by_size = dict[Sizes, list[Estimate]]()
    for estimate in estimates:
        by_size.setdefault(estimate.sizes, []).append(estimate)
    return Rate(next(iter(by_size.values())), dict(sorted(by_size.items())))


def _fits(plan: RunPlan, options: argparse.Namespace) -> bool | None:
    """None if it may fit, but the memory of a rank is not known."""
    needs = (plan.memory.total, options.memory_gigabytes), (plan.grid.ranks_per_node * plan.memory.host, options.host_memory_gigabytes)
    is_too_large = any(need > gigabytes * GIGABYTE for need, gigabytes in needs if gigabytes is not None)
    return False if is_too_large else None if options.memory_gigabytes is None else True


def _machine(gigabits: float, flops_per_second: float, options: argparse.Namespace) -> Machine:
    return planned_machine(
        gigabits * options.link_efficiency,
        options.intra_gigabytes,
        flops_per_second,
        is_on_gpu=options.device == "gpu",
        inter_milliseconds=options.inter_milliseconds,
        overlap=Overlap(options.overlap) if options.overlap else None,
    )


def _flops_per_second(options: argparse.Namespace, plan: RunPlan) -> float:
    """That of the plan's sizes and batch, the same for all members."""
    seconds: float | None = options.step_seconds
    return options.teraflops * TERA if seconds is None else plan.flops_per_second(seconds)


def _vocab_size(given: Config) -> int:
    """The ids of the tokenizer if its files are given."""
    data = assume(given).data
    if any(getattr(data, name) is not None for name in TOKENIZER_FILES):
        return build_tokenizer(data).vocab_size
    return data.vocab_size or MOCK_VOCAB_SIZE


def _split(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this tool, and the flags of the training script: those after `--`; without `--`, those unknown to this tool."""
    if "--" not in arguments:
        return parsed_with_flags_of_run(parser, arguments)
    at = arguments.index("--")
    return parsed(parser, arguments[:at]), list(arguments[at + 1 :])


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive; give a positive number")
    return number


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is negative or not a number; give 0 or more")
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
    add("--inter-gigabits", type=_positive, nargs="+", metavar="X", help="rates of a node's link to the others, Gbit/s; none for one node")
    add(
        "--inter-milliseconds",
        type=_not_negative,
        default=0.0,
        metavar="X",
        help="round trip between two nodes, as ping shows it (default: %(default)s)",
    )
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
    add("--memory-gigabytes", type=_positive, metavar="X", help="memory that a rank may use; without it, it is not checked")
    add(
        "--host-memory-gigabytes",
        type=_positive,
        metavar="X",
        help="memory of a node's host, which its ranks share; without it, it is not checked",
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
