"""The tables and the advice that plan_run.py prints, and the same figures as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from plan_estimates import Estimate, Rate, Sizes, recommended, sizes_of

from megatron_zpp.config.counted import counted
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.training.hardware import GIGABYTE
from megatron_zpp.training.memory_need import in_gib
from megatron_zpp.training.run_plan import PlannedWorld, RunPlan
from megatron_zpp.zero.plan.time_model import Computation

TRAFFIC_HEADER = ("GB into a node", "GB into a rank inside its node")
TENSOR_HEADER = "GB into a rank over the tensor link"
CONTEXT_HEADER = "GB into a rank over the context link"
ZEROPP = "ZeRO++"  # whose price lean is compared with
FITS = {True: "yes", False: "no", None: "not checked"}


def plan_as_text(world: PlannedWorld, zero3: RunPlan, computation: Computation, by_rate: dict[float, Rate]) -> str:
    microbatches = zero3.job.microbatches
    seconds = computation.seconds * microbatches
    parameters = parameter_count(zero3.config.model, zero3.padded_vocab_size)
    members = next(iter(by_rate.values())).members
    lines = [
        f"{parameters / 1e9:.3g} billion parameters on {counted(world.nodes, 'node')} x {counted(world.ranks_per_node, 'rank')}, "
        f"{counted(microbatches, 'micro-batch', 'micro-batches')} of "
        f"{zero3.config.training.micro_batch_size} per rank and iteration{_groups(zero3)}, {seconds:.4g} s of computation per iteration",
        "",
        *_memory_table(members),
        *_about_host(world, zero3),
    ]
    if any(estimate.fits is None for estimate in members):
        lines += ["", "Whether it fits is not checked without --memory-gigabytes, the memory that a rank may use."]
    for gigabits, rate in by_rate.items():
        link = f"Link of a node: {gigabits:g} Gbit/s in each direction" if isfinite(gigabits) else "One node, without a link to others"
        lines += ["", link, "", *_time_table(rate.members), ""]
        lines += [*_size_table(rate.by_size), _advice(rate.members)]
    return "\n".join(lines)


def _groups(plan: RunPlan) -> str:
    sizes = sizes_of(plan)
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
            FITS[estimate.fits],
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
        "copy of weights",
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
        rows.append([estimate.plan.member.name, *map(in_gib, parts), FITS[estimate.fits]])
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
    sizes = sizes_of(estimates[0].plan)
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
    fastest = min((estimate for estimate in estimates if estimate.may_fit), key=lambda estimate: estimate.time.seconds)
    gain = "simpler" if member.features < fastest.plan.member.features else "in less memory"
    why = "the fastest that fits" if choice.fits else "the fastest"
    if fastest is not choice:
        why = f"{time / fastest.time.seconds - 1:.1%} behind {fastest.plan.member.name}, {gain}"
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
        "copy of weights": (own.secondary, others.secondary),
        "buffers": (own.buffers, others.buffers),
    }
    words = [f"{name} {in_gib(here)} instead of {in_gib(there)}" for name, (here, there) in parts.items() if here != there]
    difference = f"{in_gib(abs(more))} {'more' if more > 0 else 'less'} memory per rank than {ZEROPP}"
    slower = other.time.seconds / lean.time.seconds
    return (
        f"\nIts price: {difference} ({', '.join(words)}), and fewer bits per value. {ZEROPP} takes {slower:.2f} times as long; "
        "compare the loss of both on your model."
    )


def plan_as_json(world: PlannedWorld, by_rate: dict[float, Rate]) -> dict[str, Any]:
    return {
        "nodes": world.nodes,
        "ranks_per_node": world.ranks_per_node,
        "rates": [
            {
                "inter_gigabits": gigabits if isfinite(gigabits) else None,
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
