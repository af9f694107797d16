"""The tables and the advice that plan_run.py prints, and the same figures as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from megatron_zpp.config.counted import counted, in_gib
from megatron_zpp.training.hardware import GIGABYTE
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.memory_need import MemoryNeed
from megatron_zpp.training.plan.kinds import ACTIVATIONS, COPY, GATHERED, GRADIENTS, KEPT_INPUTS, OPTIMIZER, OTHER, OUTER, PAYLOADS, WEIGHTS
from megatron_zpp.training.plan_words import islands_in_words, mfu, model_in_words, rounded, tokens_per_second, wrapped
from megatron_zpp.training.run_plan import RunPlan
from planning.estimates import REASONS, Estimate, Rate, Sizes, choices, fastest, recommended

GIB, MIB = 2**30, 2**20
FITS = {True: "yes", False: "no", None: "?"}
PLACES = ("Second", "Third")
# Columns of the table of memory. Those in which no member has anything are left out.
PARTS: dict[str, Callable[[MemoryNeed], int]] = {
    "weights": lambda need: need.of(WEIGHTS),
    "gradients": lambda need: need.of(GRADIENTS),
    "optimizer": lambda need: need.of(OPTIMIZER),
    "copy": lambda need: need.of(COPY),
    "outer": lambda need: need.of(OUTER),
    "gathered": lambda need: need.of(GATHERED),
    "buffers": lambda need: need.of(PAYLOADS, OTHER),
    "activations": lambda need: need.of(ACTIVATIONS, KEPT_INPUTS),
    "saving": lambda need: need.save_copy_on_device,
    "GPU": lambda need: need.device.total,
    "total": lambda need: need.total,
    "host": lambda need: need.host,
}


def plan_as_text(world: PlannedWorld, zero3: RunPlan, vocab_size: int, flops_per_second: float, by_rate: dict[float, Rate]) -> str:
    """The whole plan, in lines of COLUMNS characters at most (training/plan_words.py)."""
    lines = [*_headline(world, zero3, vocab_size, flops_per_second), ""]
    lines += [*_memory_table(next(iter(by_rate.values())).as_given), *_about_host(world, zero3)]
    for gigabits, rate in by_rate.items():
        link = f"Link of a node: {gigabits:g} Gbit/s in each direction" if isfinite(gigabits) else "One node, without a link to others"
        lines += ["", f"{link}. GB are received in an iteration.", "", *_time_table(rate.as_given), "", *_size_table(rate), *_advice(rate)]
    return "\n".join(map(wrapped, lines))


def _headline(world: PlannedWorld, plan: RunPlan, vocab_size: int, flops_per_second: float) -> list[str]:
    microbatches, training, grid = plan.microbatches, plan.config.training, plan.grid
    groups = [f"; {grid.tensor_ranks} ranks share layers and samples"] * (grid.tensor_ranks > 1)
    groups += [f"; {grid.context_ranks} divide the tokens of a sample"] * (grid.context_ranks > 1)
    groups += [f"; {islands_in_words(plan)}"] * plan.config.diloco.has_islands
    return [
        f"Parameters: {model_in_words(plan, vocab_size)}",
        f"World: {counted(world.nodes, 'node')} x {counted(world.ranks_per_node, 'rank')}{''.join(groups)}",
        f"Iteration: {counted(training.global_batch_size, 'sample')} of {counted(plan.config.model.seq_length, 'token')}, for each rank "
        f"{counted(microbatches, 'micro-batch', 'micro-batches')} of {training.micro_batch_size} and "
        f"{plan.step.flops / flops_per_second:.4g} s of computation",
    ]


def _memory_table(estimates: Sequence[Estimate]) -> list[str]:
    needs = [estimate.plan.memory for estimate in estimates]
    parts = {name: nbytes for name, nbytes in PARTS.items() if any(map(nbytes, needs))}
    unit, name = (GIB, "GiB") if max(need.total for need in needs) >= GIB else (MIB, "MiB")
    rows = [
        [estimate.plan.member.name, *(_with_one_decimal(part(estimate.plan.memory) / unit) for part in parts.values()), FITS[estimate.fits]]
        for estimate in estimates
    ]
    notes = {
        "copy": "copy: of weights",
        "outer": f"outer: {OUTER}",
        "GPU": "GPU: what CUDA and NCCL take",
        "host": "host: not part of the total",
    }
    explained = "; ".join(note for part, note in notes.items() if part in parts)
    title = f"Memory per rank in {name}{f' ({explained})' if explained else ''}:"
    lines = [title, "", *_table(["", *parts, "fits"], rows)]
    if any(estimate.fits is None for estimate in estimates):
        lines += ["", "Whether it fits is not checked without --memory-gigabytes, the memory that a rank may use."]
    return lines


def _with_one_decimal(number: float) -> str:
    return f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def _about_host(world: PlannedWorld, zero3: RunPlan) -> list[str]:
    """A line about an optimizer on the host; empty if it is on the device."""
    if not zero3.config.zero.optimizer_cpu_offload:
        return []
    if not world.is_on_gpu:
        return ["", "--optimizer-cpu-offload: the device is the host, so nothing is moved."]
    ranks = world.ranks_per_node
    return ["", f"--optimizer-cpu-offload: on the host AdamW has the cores of a node divided by {ranks}; stage 0 stays on the device."]


def _time_table(estimates: Sequence[Estimate]) -> list[str]:
    has_peak = estimates[0].plan.config.logging.device_peak_tflops is not None
    header = ["", "node GB", "rank GB", "collectives", "seconds", "tokens/s", "per rank", *["MFU"] * has_peak, "x ZeRO-3", "busy longest"]
    zero3 = next(estimate.time.seconds for estimate in estimates if estimate.plan.member.name == "ZeRO-3")
    rows = []
    for estimate in estimates:
        plan, seconds = estimate.plan, estimate.time.seconds
        speed, share = tokens_per_second(plan, seconds), mfu(plan, seconds)
        rows.append(
            [
                plan.member.name,
                *_in_gigabytes(estimate.node_bytes, plan.rank_bytes),
                str(plan.step.collectives),
                rounded(seconds),
                rounded(speed),
                rounded(speed / plan.world_size),
                *([] if share is None else [f"{share:.1%}"]),
                f"{zero3 / seconds:.2f}",
                estimate.bound_by,
            ]
        )
    lines = _table(header, rows)
    about = "node GB: into a node from others; rank GB: into a rank inside its node; per rank: tokens/s"
    peak = f"; MFU: of {estimates[0].plan.config.logging.device_peak_tflops:g} TFLOP/s (--device-peak-tflops)" if has_peak else ""
    return [*lines, "", f"{about}{peak}."]


def _size_table(rate: Rate) -> list[str]:
    """One line for each pair of sizes that groups could have; none if no ranks could be a group."""
    if len(rate.by_size) == 1 and Sizes(1, 1) in rate.by_size:
        return []
    header = ["T", "C", "member", "k", "node GB", "rank GB", "tensor GB", "context GB", "memory", "fits", "seconds", "tokens/s"]
    rows = []
    for sizes, estimates in rate.by_size.items():
        estimate = fastest(estimates) or min(estimates, key=lambda estimate: estimate.plan.memory.total)
        plan, seconds = estimate.plan, estimate.time.seconds
        moved = estimate.node_bytes, plan.rank_bytes, plan.tensor_bytes, plan.exchanges.context_bytes
        rows.append(
            [
                *map(str, sizes),
                plan.member.name,
                str(plan.microbatches),
                *_in_gigabytes(*moved),
                in_gib(plan.memory.total),
                FITS[estimate.fits],
                rounded(seconds),
                rounded(tokens_per_second(plan, seconds)),
            ]
        )
    about = (
        "The fastest member that fits for each --tensor-model-parallel-size T and --context-parallel-size C, with k micro-batches; "
        "tensor GB and context GB: into a rank over the links of these groups."
    )
    return [about, "", *_table(header, rows), ""]


def _in_gigabytes(*counts: int) -> list[str]:
    return [rounded(nbytes / GIGABYTE) for nbytes in counts]


def _advice(rate: Rate) -> list[str]:
    """The recommended flags, the next choices, and what these cost."""
    found = choices(rate.tried)
    if not found:
        return [_nothing_fits(rate)]
    first, *others = found
    given = rate.as_given[0].sizes
    lines = [f"Recommended: {_flags(first, given)} ({_name(first)}, {_why(first, rate.tried)})"]
    for place, other in zip(PLACES, others, strict=False):
        lines.append(f"{place} choice: {_flags(other, given)} ({_name(other)}): {_price(other, first)}")
    if first.sizes != given:
        own = recommended(rate.as_given)
        cost = f"{own.plan.flags} ({own.plan.member.name}): {_price(own, first)}" if own is not None else "no member fits"
        lines.append(f"With {given.flags}: {cost}")
    if first.plan.member.is_lean:
        lines.append("Lean sends fewer bits per value; compare its loss with that of another member on your model.")
    return lines


def _flags(estimate: Estimate, given: Sizes) -> str:
    return estimate.plan.flags if estimate.sizes == given else f"{estimate.sizes.flags} {estimate.plan.flags}"


def _name(estimate: Estimate) -> str:
    groups = [f"{letter} = {size}" for letter, size in zip("TC", estimate.sizes, strict=True) if size > 1]
    return " with ".join(filter(None, [estimate.plan.member.name, " and ".join(groups)]))


def _why(choice: Estimate, tried: Sequence[Estimate]) -> str:
    best = fastest(tried)
    if best is None or best is choice:
        return "the fastest that fits" if choice.fits else "the fastest"
    pairs = zip(REASONS, choice.simplicity, best.simplicity, strict=True)
    reason = next(reason for reason, own, others in pairs if own != others)
    return f"{choice.time.seconds / best.time.seconds - 1:.1%} behind {_name(best)}, {reason}"


def _price(choice: Estimate, first: Estimate) -> str:
    """What a choice costs in an iteration beside the first one, in what differs."""
    seconds, nbytes = choice.time.seconds - first.time.seconds, choice.node_bytes - first.node_bytes
    memory = choice.plan.memory.total - first.plan.memory.total
    parts = {
        f"{rounded(abs(seconds), 3)} s {_more(seconds)} ({choice.time.seconds / first.time.seconds:.2f} times as long)": seconds,
        f"{rounded(abs(nbytes) / GIGABYTE, 3)} GB {_more(nbytes)} between nodes": nbytes,
        f"{in_gib(abs(memory))} {_more(memory)} memory per rank": memory,
    }
    return ", ".join(words for words, difference in parts.items() if difference) or "it costs the same"


def _more(difference: float) -> str:
    return "more" if difference > 0 else "less"


def _nothing_fits(rate: Rate) -> str:
    """Says so, with the plan that needs least memory, and what the run could have in addition."""
    least = min(rate.tried, key=lambda estimate: estimate.plan.memory.total)
    config = least.plan.config
    has_islands = config.diloco.has_islands
    levers = ["more nodes for each island" if has_islands else "more nodes"]
    levers += ["--checkpoint-activations"] * (config.model.recompute_granularity != "full")
    levers += ["a smaller --micro-batch-size"] * (config.training.micro_batch_size > 1)
    may_offload = least.plan.memory.is_on_gpu and not has_islands
    levers += ["--optimizer-cpu-offload"] * (may_offload and not config.zero.optimizer_cpu_offload)
    given = rate.as_given[0].sizes
    return (
        f"Recommended: none of these fits; {_flags(least, given)} ({_name(least)}) needs the least, {in_gib(least.plan.memory.total)}. "
        f"Take {', '.join(levers)}, or a larger --context-parallel-size for long samples."
    )


def plan_as_json(world: PlannedWorld, by_rate: dict[float, Rate]) -> dict[str, Any]:
    return {
        "nodes": world.nodes,
        "ranks_per_node": world.ranks_per_node,
        "rates": [{"inter_gigabits": gigabits if isfinite(gigabits) else None, **_rate_json(rate)} for gigabits, rate in by_rate.items()],
    }


def _rate_json(rate: Rate) -> dict[str, Any]:
    """recommended: the name of the member; choices: it and the next ones, each with its flags."""
    found, given = choices(rate.tried), rate.as_given[0].sizes
    return {
        "recommended": found[0].plan.member.name if found else None,
        "choices": [{**_estimate_json(choice), "flags": _flags(choice, given)} for choice in found],
        "members": {estimate.plan.member.name: _estimate_json(estimate) for estimate in rate.as_given},
        "tried": [_estimate_json(estimate) for estimate in rate.tried],
    }


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    plan = estimate.plan
    return {
        "member": plan.member.name,
        "tensor_model_parallel_size": estimate.sizes.tensor,
        "context_parallel_size": estimate.sizes.context,
        "memory_bytes": plan.memory.total,
        "host_bytes": plan.memory.host,
        "fits": estimate.fits,
        "inter_node_bytes": plan.node_bytes,
        "intra_node_bytes": plan.rank_bytes,
        "tensor_link_bytes": plan.tensor_bytes,
        "context_link_bytes": plan.exchanges.context_bytes,
        "context_inter_node_bytes": plan.exchanged_node_bytes,
        "outer_node_bytes": plan.outer_node_bytes,
        "seconds": estimate.time.seconds,
        "tokens_per_second": tokens_per_second(plan, estimate.time.seconds),
    }


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown whose columns are aligned in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * max(widths[0], 3), *("-" * (max(width, 2) - 1) + ":" for width in widths[1:])]
    widths = [len(cell) for cell in rule]
    first = [f"{cells[0]:<{widths[0]}}" for cells in (header, rule, *rows)]
    others = [[f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True)] for cells in (header, rule, *rows)]
    return [f"| {' | '.join([name, *cells])} |" for name, cells in zip(first, others, strict=True)]
