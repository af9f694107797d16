"""Figures of steps: over slow links (two_nodes.py), on one node (train_step.py), and as the time model predicts them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from figures.figure import SAYS, Figure
from figures.results import FOLDER, in_three_digits, over, rates, results, rounded_up, slower, spread, workload
from slow_links.configurations import DEEPSPEED, DEEPSPEED_KEPT, DEEPSPEEDS

from megatron_zpp.training.hardware import (
    CPU_CODEC,
    GLOO_COLLECTIVE_SECONDS,
    GPU_CODEC,
    HOST,
    NCCL_INTER_COLLECTIVE_SECONDS,
    NCCL_INTRA_COLLECTIVE_SECONDS,
    SOCKET,
)

README, PAGE, BENCHMARKS = "README.md", "docs/slow_links.md", "benchmarks/README.md"
NANO, PICO = 1e-9, 1e-12


def speedups(rate: str) -> list[object]:
    """A row of the table of 2 x 2: f, and both sets beside what their bytes allow."""
    rated = rates("2x2")[rate]
    paper, lean = rated.rows["ZeRO++"], rated.rows["lean"]
    row = (paper.over_zero3, paper.allowed, lean.over_zero3, lean.allowed, over("lean", "ZeRO++", rate), paper.over_fsdp2, lean.over_fsdp2)
    return ["0" if rated.f is None else f"{rated.f:.2f}", *map(in_three_digits, row)]


def speedups_of_4x2(rate: str) -> list[object]:
    rated = rates("4x2")[rate]
    paper, zero3 = rated.rows["ZeRO++"], rated.rows["ZeRO-3"]
    row = (paper.over_zero3, paper.allowed, paper.over_fsdp2, zero3.over_fsdp2)
    return ["0" if rated.f is None else f"{rated.f:.2f}", *map(in_three_digits, row)]


def beside_deepspeed(peer: str, rate: str) -> list[object]:
    """A row of the table of DeepSpeed: its bytes, and how many times as fast ours and FSDP2 are."""
    names = ("FSDP2", "ZeRO-3", "ZeRO++", "lean")
    return [in_models("2x2_deepspeed", peer, rate), *(over(name, peer, rate, "2x2_deepspeed") for name in names)]


def over_deepspeed(name: str) -> list[float]:
    """The least and the most of its settings, at 65 Mbit/s."""
    factors = [over(name, peer, "65mbit", "2x2_deepspeed") for peer in DEEPSPEEDS]
    return [min(factors), max(factors)]


def gloos_part(peer: str) -> float:
    """The factor by which a peer would be faster at 65 Mbit/s if its reduce-scatter moved only the necessary bytes."""
    rated = rates("2x2_deepspeed")["65mbit"]
    return rated.rows[peer].seconds.median / rated.ring_seconds[peer]


def largest_spread(rate: str) -> float:
    """By how many percent the slowest round of a configuration exceeds its fastest, the most of all configurations."""
    seconds = [row.seconds for row in rates("2x2_deepspeed")[rate].rows.values()]
    return 100 * max(found.most / found.least - 1 for found in seconds)


def over_without_gloo(peer: str) -> float:
    """How many times as fast ZeRO-3 would be as the peer without those bytes."""
    rated = rates("2x2_deepspeed")["65mbit"]
    return rated.ring_seconds[peer] / rated.rows["ZeRO-3"].seconds.median


def largest_loss_gap(name: str, other: str) -> float:
    """Between the losses at the ends of the rounds of train_step.py."""
    first, second = (
        next(one for one in results("train_step_deepspeed")["results"] if one["name"] == each)["losses"] for each in (name, other)
    )
    return max(abs(own - others) for own, others in zip(first, second, strict=True))


def in_words(rate: str) -> str:
    return rate.replace("mbit", " Mbit/s")


def beyond_the_ledger(world: str) -> float:
    """The largest share of bytes that only the kernel counted, in percent."""
    shares = [row.kernel_over_ledger or 0.0 for rated in rates(world).values() for row in rated.rows.values()]
    return rounded_up(100 * max(map(abs, shares)), 1)


def in_models(world: str, name: str, rate: str | None = None) -> float:
    found = rates(world)
    return found[rate or list(found)[-1]].rows[name].in_models


def allowed_over_fsdp2(world: str, name: str) -> float:
    return in_models(world, "FSDP2") / in_models(world, name)


def parts(world: str) -> Sequence[float]:
    """The parts of the gain over FSDP2 at the slowest rate."""
    return tuple(list(rates(world).values())[-1].gain_by_part("ZeRO++").values())


def found_in(name: str, pattern: str) -> list[float]:
    """The numbers that a pattern finds in a table of results."""
    return [float(number) for number in re.findall(pattern, (FOLDER / name).read_text(encoding="utf-8"))]


def ratio(name: str, other: str, way: str, file: str) -> float:
    """Time ("seconds") or memory ("peak_bytes") of a step relative to another one's."""
    first, second = (next(one for one in results(file)["results"] if one["name"] == each)[way] for each in (name, other))
    return statistics.median(own / others for own, others in zip(first, second, strict=True)) if way == "seconds" else first / second


def of_tensor(name: str) -> list[float]:
    return [ratio(name, "T = 1", way, "train_step_tensor") for way in ("seconds", "peak_bytes")]


FIGURES = (
    Figure(
        README,
        "At 65 Mbit/s lean is {:.1f}x as fast as ZeRO-3 here, and {:.1f}x as fast as FSDP2;",
        lambda: (over("lean", "ZeRO-3", "65mbit"), over("lean", "FSDP2", "65mbit")),
    ),
    Figure(
        README,
        "Of the {:.1f}x, {:.2f}x is due to gloo's reduce-scatter. Without a limit",
        lambda: (over("lean", "FSDP2", "65mbit"), parts("2x2")[0]),
    ),
    Figure(README, "in another run {:.1f}x to {:.1f}x as fast as", lambda: over_deepspeed("lean")),
    Figure(
        README,
        "Without a limit a step of lean takes {:.0f} % longer than one of ZeRO++.",
        lambda: [statistics.median(slower("lean", "ZeRO++"))],
    ),
    Figure(README, "{:.0f} million parameters, two simulated nodes of two CPU ranks", lambda: [workload("2x2").parameters / 1e6]),
    Figure(
        PAGE,
        "2 nodes x 2 ranks: {:.0f} million parameters in bf16, one micro-batch per step, on {} cores, {}, medians of {} rounds.",
        lambda: (
            workload("2x2").parameters / 1e6,
            SAYS[results("two_nodes_2x2")["machine"]["cores"]],
            results("two_nodes_2x2")["date"],
            len(results("two_nodes_2x2")["rates"]["unlimited"]),
        ),
    ),
    *(
        Figure(PAGE, f"| {in_words(rate)} |" + " {} |" * 8, lambda rate=rate: speedups(rate))
        for rate in ("unlimited", "700mbit", "350mbit", "160mbit", "65mbit")
    ),
    Figure(
        PAGE,
        "one round, {}, before there was `--zeropp lean`: {:.0f} million parameters",
        lambda: (results("two_nodes_4x2")["date"], workload("4x2").parameters / 1e6),
    ),
    *(
        Figure(PAGE, f"| 4 x 2 | {in_words(rate)} |" + " {} |" * 5, lambda rate=rate: speedups_of_4x2(rate))
        for rate in ("unlimited", "410mbit", "200mbit", "90mbit", "28mbit")
    ),
    *(
        Figure(
            PAGE, f"| {peer} | {in_words(rate)} | {{:.2f}} |" + " {:.2f} |" * 4, lambda peer=peer, rate=rate: beside_deepspeed(peer, rate)
        )
        for peer in DEEPSPEEDS
        for rate in ("unlimited", "65mbit")
    ),
    Figure(
        PAGE,
        "beside DeepSpeed {}, {}, medians of {} rounds without limit and {} at 65 Mbit/s",
        lambda: (
            results("two_nodes_2x2_deepspeed")["notes"]["deepspeed"],
            results("two_nodes_2x2_deepspeed")["date"],
            *(SAYS[len(results("two_nodes_2x2_deepspeed")["rates"][rate])] for rate in ("unlimited", "65mbit")),
        ),
    ),
    Figure(
        PAGE,
        "steps of one configuration differ by up to {:.0f} % between rounds, at 65 Mbit/s by up to {:.0f} %.",
        lambda: [largest_spread(rate) for rate in ("unlimited", "65mbit")],
    ),
    Figure(
        "docs/coming_from_deepspeed.md",
        "two nodes of two CPU ranks with a link of 65 Mbit/s, ZeRO-3 here is {:.2f} times as fast as DeepSpeed's, ZeRO++ {:.2f} times and "
        "lean {:.2f} times",
        lambda: [over(name, DEEPSPEED, "65mbit", "2x2_deepspeed") for name in ("ZeRO-3", "ZeRO++", "lean")],
    ),
    Figure(
        PAGE,
        "At 65 Mbit/s it accounts for a factor of {:.2f}, and of {:.2f} with weights kept. By the model without it, ZeRO-3 would be {:.2f} "
        "times as fast as DeepSpeed's, and {:.2f} times as fast as DeepSpeed's with weights kept",
        lambda: [value(peer) for value in (gloos_part, over_without_gloo) for peer in (DEEPSPEED, DEEPSPEED_KEPT)],
    ),
    Figure(PAGE, "and the few messages of the rendezvous store: {} % at most.", lambda: [beyond_the_ledger("4x2")]),
    Figure(
        PAGE,
        "The ledger and the kernel's counters agree within {} % (2 x 2) and {} % (4 x 2,",
        lambda: (beyond_the_ledger("2x2"), beyond_the_ledger("4x2")),
    ),
    Figure(
        PAGE,
        "There lean takes {:.0f} % longer than ZeRO++ ({:.0f} to {:.0f} % in three rounds)",
        lambda: (statistics.median(slower("lean", "ZeRO++")), *spread(slower("lean", "ZeRO++"))),
    ),
    Figure(
        PAGE,
        "bring {:.1f} M(N - 1)/N into a node with 4 nodes, and {:.1f} with 2 nodes.",
        lambda: (in_models("4x2", "FSDP2"), in_models("2x2", "FSDP2")),
    ),
    Figure(
        PAGE,
        "the largest speedup over FSDP2 that bytes allow is {:.1f} with 4 nodes and {:.1f} with 2 nodes for ZeRO++, and {:.0f} "
        "with 2 nodes "
        "for lean.",
        lambda: (allowed_over_fsdp2("4x2", "ZeRO++"), allowed_over_fsdp2("2x2", "ZeRO++"), allowed_over_fsdp2("2x2", "lean")),
    ),
    Figure(
        PAGE,
        "With 8 micro-batches per step ZeRO++ brings {:.2f} M(N - 1)/N into a node, ZeRO-3 {:.1f} and hpZ alone {:.2f}.",
        lambda: [in_models("2x2_k8", name) for name in ("ZeRO++", "ZeRO-3", "+hpZ")],
    ),
    Figure(
        PAGE,
        "implemented by an all-reduce, {:.2f}; two hops and overlap {:.2f}; quantization and secondary copies {:.2f} (ZeRO++) "
        "and {:.2f} (lean).",
        lambda: (*parts("2x2"), rates("2x2")["65mbit"].gain_by_part("lean")["quantization and secondary copies"]),
    ),
    Figure(PAGE, "In 4 x 2 two hops and overlap give {:.2f}, quantization and secondary copies {:.2f}.", lambda: parts("4x2")[1:]),
    # The time model
    Figure(
        PAGE,
        "plus a constant per collective (gloo {:.1f} ms; NCCL {:.0f} and {:.0f} microseconds)",
        lambda: (1e3 * GLOO_COLLECTIVE_SECONDS, 1e6 * NCCL_INTER_COLLECTIVE_SECONDS, 1e6 * NCCL_INTRA_COLLECTIVE_SECONDS),
    ),
    Figure(
        PAGE,
        "for each byte that a rank receives, {:.1f} ns in a gather and {:.1f} ns in an exchange",
        lambda: (SOCKET.gathered / NANO, SOCKET.exchanged / NANO),
    ),
    Figure(
        PAGE,
        "a node's cores update {:.0f}e9 values per second together, and each GPU copies {:.0f} GB/s in each direction: both are "
        "assumed (the H100 copied {:.0f} GB/s);",
        lambda: (
            HOST.values_per_second * NANO,
            HOST.bytes_per_second * NANO,
            NANO * min(results("gpu_h100")["host_link_bytes_per_second"].values()),
        ),
    ),
    Figure(
        PAGE,
        "measured ({:.2f} ns to encode, {:.2f} ns to decode), on a GPU what an H100 took: {:.1f} ps to encode, {:.1f} ps to decode, and "
        "{:.1f} ps for each member of a mean,",
        lambda: (
            CPU_CODEC.encoded / NANO,
            CPU_CODEC.decoded / NANO,
            *(seconds / PICO for seconds in (GPU_CODEC.encoded, GPU_CODEC.decoded, GPU_CODEC.summed)),
        ),
    ),
    Figure(
        PAGE,
        "per value {:.2f} ns to encode and {:.2f} ns to decode on a CPU core with AVX-512, and {:.2f} ns more with a second round",
        lambda: (
            (CPU_CODEC.gaussian_encoded + CPU_CODEC.rotated) / NANO,
            (CPU_CODEC.gaussian_decoded + CPU_CODEC.rotated) / NANO,
            CPU_CODEC.rotated / NANO,
        ),
    ),
    Figure(
        PAGE,
        "On a GPU it takes {:.1f} ps to encode and {:.1f} ps to decode, both on the H100, and {:.2f} ps more with a second round,",
        lambda: (
            (GPU_CODEC.gaussian_encoded + GPU_CODEC.rotated) / PICO,
            (GPU_CODEC.gaussian_decoded + GPU_CODEC.rotated) / PICO,
            GPU_CODEC.rotated / PICO,
        ),
    ),
    Figure(
        PAGE,
        "cost of a difference from the kept copy is an estimate: {:.1f} ns on a CPU core, and {:.1f} ps on a GPU.",
        lambda: (CPU_CODEC.subtracted / NANO, GPU_CODEC.subtracted / PICO),
    ),
    Figure(
        PAGE,
        "For 2 nodes x 2 ranks the error is {:.1f} % on average at limited rates.",
        lambda: found_in("two_nodes_2x2.md", r"Mean error at limited rates ([\d.]+)%"),
    ),
    Figure(
        PAGE,
        "Without a limit ZeRO++ and lean are predicted {:.0f} to {:.0f} % too slow there.",
        lambda: (
            found_in("two_nodes_2x2.md", r"unlimited \| .*?\(\+(\d+)%\) \| \d+ / \d+ \(\+\d+%\) \|\n")
            + found_in("two_nodes_2x2.md", r"unlimited \| .*\(\+(\d+)%\) \|\n")
        ),
    ),
    Figure(
        PAGE,
        "take about the same time, steps are predicted up to {:.0f} % too fast:",
        lambda: [
            max(
                found_in("two_nodes_2x2.md", r"700mbit \| (?:[^|]*\| )*?\d+ / \d+ \(-(\d+)%\)")
                + found_in("two_nodes_2x2.md", r"700mbit \| [^|]*\| \d+ / \d+ \(-(\d+)%\)")
            )
        ],
    ),
    Figure(PAGE, "(mean error {:.0f} %). Then,", lambda: found_in("paper_table.md", r"ZeRO-3: mean error ([\d.]+)%")),
    Figure(
        PAGE,
        "With one fitted constant, {:.0f} ps per value, the error is {:.0f} % on average and {:.0f} % at most.",
        lambda: (
            *found_in("paper_table.md", r"codecs ([\d.]+) ps/value"),
            *found_in("paper_table.md", r"ZeRO\+\+, codecs fitted: mean error ([\d.]+)%"),
            *found_in("paper_table.md", r"ZeRO\+\+, codecs fitted: .*largest \+([\d.]+)%"),
        ),
    ),
    # One node
    Figure(
        BENCHMARKS,
        "our step takes {:.2f} of the time with {:.2f} of the memory (`results/train_step.json`)",
        lambda: [ratio("ZeRO-3", "FSDP2", way, "train_step") for way in ("seconds", "peak_bytes")],
    ),
    Figure(
        BENCHMARKS,
        "With {:.1f} million parameters, {} tokens per step, two simulated nodes of two ranks, and a processor without bf16 instructions, "
        "where products are most of a step for both, it takes {:.2f} of the time with {:.2f} of the memory",
        lambda: [
            results("train_step_small")["parameters"] / 1e6,
            results("train_step_small")["tokens_per_step"],
            *(ratio("ZeRO-3", "FSDP2", way, "train_step_small") for way in ("seconds", "peak_bytes")),
        ],
    ),
    Figure(
        BENCHMARKS,
        "With DeepSpeed {} beside them, measured {} in {} rounds on a slower day of the machine, DeepSpeed's ZeRO-3 takes {:.2f} of "
        "FSDP2's time with {:.2f} of its memory, and our step {:.2f} with {:.2f} (`results/train_step_deepspeed.json`). At the ends of "
        "the rounds DeepSpeed's loss differs from ours by at most {:.4f}, and FSDP2's by {:.4f}.",
        lambda: (
            *(results("train_step_deepspeed")[key] for key in ("deepspeed", "date")),
            len(results("train_step_deepspeed")["results"][0]["seconds"]),
            *(ratio(name, "FSDP2", way, "train_step_deepspeed") for name in (DEEPSPEED, "ZeRO-3") for way in ("seconds", "peak_bytes")),
            *(largest_loss_gap(name, "ZeRO-3") for name in (DEEPSPEED, "FSDP2")),
        ),
    ),
    Figure(
        BENCHMARKS,
        "On four ranks on two cores, with {:.1f} million parameters, {} tokens per step and {} rounds, T = 2 takes {:.2f} of the "
        "time of T = 1 with {:.2f} of its memory, T = 4 {:.2f} with {:.2f}; with `--sequence-parallel` {:.2f} "
        "with {:.2f}, and {:.2f} with {:.2f}",
        lambda: (
            results("train_step_tensor")["parameters"] / 1e6,
            results("train_step_tensor")["tokens_per_step"],
            len(results("train_step_tensor")["results"][0]["seconds"]),
            *(figure for size in (2, 4) for figure in of_tensor(f"T = {size}")),
            *(figure for size in (2, 4) for figure in of_tensor(f"T = {size}, sequence parallel")),
        ),
    ),
)
