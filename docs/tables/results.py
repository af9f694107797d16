"""Tables of what was measured (benchmarks/results), mostly as the program prints them that measured it."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import (
    checkpoint,
    code_errors,
    data_index,
    dropout,
    gpu_host_path,
    gpu_table,
    head_loss,
    host_adam,
    long_sequences,
    preprocess,
    quantization,
    reshard,
    save_copies,
    scale,
    sockets,
    train_step,
)
from benchmarks.loss_study.gaps import Gap, Interval, gaps_of
from benchmarks.loss_study.report import table as loss_table
from benchmarks.loss_study.settings import EVERY_16_STEPS, PLAIN, RATES, plain_of
from benchmarks.loss_study.training import Outcome
from benchmarks.report import in_table
from benchmarks.slow_links.analysis import Rated, analyse, ratio_of_seconds
from benchmarks.slow_links.configurations import ALL, DEEPSPEEDS, FSDP2, LEAN, SETS, ZERO3, Workload
from benchmarks.slow_links.record import Record
from benchmarks.time_study import report as time_report
from benchmarks.time_study.analysis import Findings
from benchmarks.time_study.record import Record as TimeRecord
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.data.tokenizers.tokenizer import padded_vocab_size
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.ops.gaussian_reference import LEVELS, THRESHOLDS
from testbed.rates import Rate

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@cache
def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = stored(name)["results"]
    return rows


# ---- Kernels, one node, files


def integer_codes() -> str:
    """The file has no time per value: its rates count values of 2 bytes."""
    rows = (
        {**row, "codes": f"INT{row['bits']}", "nanoseconds_per_value": 2 / row["gigabytes_per_second"]}
        for row in rows_of("quantization_cpu")
    )
    return quantization.table([quantization.Result(**{name: row[name] for name in row if name != "bits"}) for row in rows])


def steps(name: str) -> str:
    return train_step.table([train_step.Result(**row) for row in rows_of(name)])


def saving() -> str:
    found = stored("checkpoint")
    return checkpoint.table(found["results"], found["state_bytes"])


def preprocessing() -> str:
    rows = [preprocess.Result(row["tokenizer"], row["megabytes"], row["seconds"]) for row in stored("preprocess")["speed"]]
    return preprocess.speed_table(rows)


def preprocessing_memory() -> str:
    return preprocess.memory_table(stored("preprocess_memory")["memory"]).partition("\n\n")[0]


def indices() -> str:
    found = stored("data_index")
    return data_index.table(Namespace(**{name: found[name] for name in ("documents", "tokens", "seq_length", "sources")}), found["figures"])


def sequences() -> str:
    return "\n".join(long_sequences.table([long_sequences.Measured(**one) for one in stored("long_sequences")["measured"]]))


# ---- GPUs


def kinds_of_work() -> str:
    """Of a step of a model of a billion parameters on an H100."""
    found = stored("gpu_h100")["seconds_by_kind"]
    return in_table(["on the device", "ms"], [[kind, f"{1e3 * seconds:.1f}"] for kind, seconds in found.items()])


@cache
def host_path(name: str) -> list[gpu_host_path.Measured]:
    return [gpu_host_path.Measured(**one) for one in stored(name)["measured"]]


# ---- Slow links


@cache
def rated(world: str) -> dict[str, Rated]:
    """By rate. world: such as 2x2."""
    workload = Workload.of_subject(stored(f"two_nodes_{world}")["subject"])
    return {str(one.rate): one for one in analyse(Record(FOLDER / f"two_nodes_{world}.json", {}, starts_anew=False), workload)}


def over(name: str, other: str, rate: str, world: str) -> float:
    """How many times as fast `name` is: the median over rounds, in which both ran side by side."""
    return ratio_of_seconds(stored(f"two_nodes_{world}")["rates"][rate], other, name)


def factor(value: float | None) -> str:
    """A speedup in three digits; 1 where no link is limited."""
    return "1" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def rate_in_words(rate: str) -> str:
    return Rate.parse(rate).in_words


def speedups(world: str) -> str:
    """f, and how much faster sets of features are than ZeRO-3 and FSDP2, by the rate of the link."""
    sets = [name for name in SETS if name in next(iter(rated(world).values())).rows]
    header = ["link of a node", "f", *(words for name in sets for words in (f"{name} over ZeRO-3", "what bytes allow"))]
    header += [f"{name} over FSDP2" for name in (ZERO3, *sets)]
    header += ["lean over ZeRO++"] if LEAN in sets else []
    lines = []
    for rate, found in rated(world).items():
        rows = [found.rows[name] for name in sets]
        cells = [value for row in rows for value in (row.over_zero3, row.allowed)]
        cells += [found.rows[name].over_fsdp2 for name in (ZERO3, *sets)]
        cells += [over(LEAN, ALL, rate, world)] if LEAN in sets else []
        lines.append([rate_in_words(rate), "0" if found.f is None else f"{found.f:.2f}", *map(factor, cells)])
    return in_table(header, lines)


def parts_of_the_speedup() -> str:
    """The factors whose product is the speedup over FSDP2 at the slowest rate."""
    lines = []
    for world in ("2x2", "4x2"):
        rate, found = list(rated(world).items())[-1]
        for name in SETS:
            if name in found.rows:
                parts = found.gain_by_part(name)
                lines.append([f"{world.replace('x', ' x ')}, {rate_in_words(rate)}, {name}", *(f"{part:.2f}" for part in parts.values())])
    return in_table(["", *parts], lines)


def models_into_a_node() -> str:
    """Bytes into a node per step, at any rate, and the largest speedup over FSDP2 that they allow."""
    lines = []
    for world, words in (("2x2", "2 x 2"), ("4x2", "4 x 2"), ("2x2_k8", "2 x 2, 8 micro-batches")):
        rows = list(rated(world).values())[-1].rows
        for name in (FSDP2, ZERO3, "+hpZ", *SETS):
            if name in rows:
                lines.append([words, name, f"{rows[name].in_models:.2f}", f"{rows[FSDP2].in_models / rows[name].in_models:.2f}"])
    return in_table(["world", "", "M (N - 1)/N", "of FSDP2's bytes, one in"], lines, words=2)


def beside_deepspeed() -> str:
    """gloo's part: how much faster a peer would be at a limited rate if its reduce-scatter moved only the necessary bytes."""
    names = (FSDP2, ZERO3, *SETS)
    lines = []
    for rate, found in rated("2x2_deepspeed").items():
        for peer in DEEPSPEEDS:
            factors = [over(name, peer, rate, "2x2_deepspeed") for name in names]
            gloo = [found.rows[peer].seconds.median / found.ring_seconds[peer], found.ring_seconds[peer] / found.rows[ZERO3].seconds.median]
            modelled = [f"{value:.2f}" for value in gloo] if found.rate.is_limited else ["", ""]
            cells = [f"{found.rows[peer].in_models:.2f}", *(f"{value:.2f}" for value in factors), *modelled]
            lines.append([peer, rate_in_words(rate), *cells])
    return in_table(["DeepSpeed's configuration", "link of a node", "bytes", *names, "gloo's part", "ZeRO-3 without it"], lines, words=2)


@cache
def findings() -> Findings:
    return Findings(TimeRecord.stored(FOLDER / "time_to_loss.json"))


# ---- Loss and codes


@cache
def outcomes(study: str) -> tuple[Outcome, ...]:
    return tuple(Outcome(**one) for one in stored(study)["outcomes"])


def gaps(study: str) -> dict[str, Gap]:
    return {gap.setting.name: gap for gap in gaps_of(outcomes(study))}


def losses(study: str) -> str:
    return loss_table(list(gaps(study).values()))


def models_of_the_study() -> str:
    lines = []
    for study, words in (("loss_parity", "narrow"), ("loss_parity_wide", "wider")):
        config = resolve(parse_flags(f"{stored(study)['flags']} --zero-stage 3".split()), 4, 2)
        vocabulary = padded_vocab_size(config.data.vocab_size or 1, config.model.make_vocab_size_divisible_by)
        found = [percent for gap in gaps(study).values() for percent in gap.percents]
        lines.append([words, f"{parameter_count(config.model, vocabulary) / 1e6:.2f}", f"{min(found):+.1f}", f"{max(found):+.1f}"])
    return in_table(["model", "million parameters", "least gap of a seed, %", "largest"], lines)


HALF = ", half the rate"
PAIRS = (
    ("lean, 1-bit differences", "lean"),
    (f"lean, 1-bit differences{HALF}", f"lean{HALF}"),
    ("lean, gradients in 16 bits", "lean"),
    ("lean, two rounds for gradients", "lean"),
    ("lean, gradients in 4 bits", "lean"),
    ("lean", "paper"),
    (f"lean{HALF}", f"paper{HALF}"),
    ("lean, 8/4-bit absmax gradients, not rotated", "paper"),
    ("lean, signs shared by senders", "lean"),
)


WIDE_PAIR = (PLAIN, EVERY_16_STEPS)
ISLAND_PAIRS = (
    ("islands, every 16 steps", "islands, every 16 steps, 16 bits"),
    ("islands, every 16 steps, one step late", "islands, every 16 steps"),
    ("islands, every 16 steps, moments averaged", "islands, every 16 steps"),
)


def islands_by_rate() -> str:
    """The losses of the wide model's first seed, by rate."""
    rate = float(re.search(r"--lr ([\d.e-]+)", stored("loss_islands_wide")["flags"])[1])  # type: ignore[index]  # every run has one
    first = {one.setting: one.validation_loss for one in outcomes("loss_islands_wide") if one.seed == 1}
    lines = [
        [f"{factor * rate:g}", *(f"{first[name]:.4f}" if (name := setting.at_rate(factor).name) in first else "" for setting in WIDE_PAIR)]
        for factor in RATES
    ]
    return in_table(["learning rate", *(setting.name for setting in WIDE_PAIR)], lines, words=0)


def islands_at_their_best() -> str:
    """Islands of the wide model beside plain training, each at the rate that was best for the first seed, over the seeds that both have."""
    by_seed: dict[str, dict[int, float]] = {}
    for one in outcomes("loss_islands_wide"):
        by_seed.setdefault(one.setting, {})[one.seed] = one.validation_loss
    tried = [[setting.at_rate(factor).name for factor in RATES] for setting in WIDE_PAIR]
    plain, own = (min((by_seed[name] for name in names if name in by_seed), key=lambda losses: losses[1]) for names in tried)
    seeds = sorted(plain.keys() & own.keys())
    gap = Interval.of([100 * (own[seed] / plain[seed] - 1) for seed in seeds])
    means = [f"{sum(losses[seed] for seed in seeds) / len(seeds):.4f}" for losses in (plain, own)]
    return in_table([*(setting.name for setting in WIDE_PAIR), "gap, %", "seeds"], [[*means, str(gap), str(len(seeds))]], words=0)


def seed_by_seed(study: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Differences of two settings' gaps, over the seeds that both have with their plain runs."""
    by_place = {(one.setting, one.seed): one.validation_loss for one in outcomes(study)}
    settings = {name: gap.setting for name, gap in gaps(study).items()}
    lines = []
    for pair in pairs:
        needed = {setting for name in pair for setting in (name, plain_of(settings[name]).name)}
        seeds = [seed for setting, seed in by_place if setting == pair[0] and all((one, seed) in by_place for one in needed)]
        own, others = (
            [100 * (by_place[name, seed] / by_place[plain_of(settings[name]).name, seed] - 1) for seed in seeds] for name in pair
        )
        interval = Interval.of([mine - theirs for mine, theirs in zip(own, others, strict=True)])
        lines.append([*pair, str(interval)])
    return in_table(["setting", "beside", "difference, %"], lines, words=2)


def levels() -> str:
    """By bits: what levels leave of a Gaussian's variance, and errors that follow from it."""
    measured = stored("code_errors")["gaussian_errors"]
    shares = {bits: _left_by_levels(bits) for bits in LEVELS}
    errors = {bits: share / (1 - share) for bits, share in shares.items()}
    lines = {
        "D, left of a Gaussian's variance": [f"{share:.4f}" for share in shares.values()],
        "D / (1 - D), the error of a decoded block": [f"{error:.4f}" for error in errors.values()],
        "the same, measured on Gaussian values": [f"{measured[str(bits)]:.4f}" for bits in LEVELS],
        "r / (1 - r), how far a copy stays behind": [f"{error / (1 - error):.3f}" for error in errors.values()],
    }
    return in_table(["", *(f"{bits} bit{'s' if bits > 1 else ''}" for bits in LEVELS)], [[name, *cells] for name, cells in lines.items()])


def _left_by_levels(bits: int) -> float:
    """1 - E(q^2), because levels are means."""
    edges = (0.0, *THRESHOLDS[bits], math.inf)
    below = [math.erf(edge / math.sqrt(2)) for edge in edges]  # of |y|
    return 1 - sum((high - low) * level**2 for (low, high), level in zip(pairwise(below), LEVELS[bits], strict=True))


def errors_of_codes() -> str:
    return code_errors.table([code_errors.BlockError(**one) for one in stored("code_errors")["errors"]])


def slopes() -> str:
    """The slope of the result of one and of two hops against the true mean, by how much the ranks' gradients have in common."""
    lines = [[f"{one['common_share']:.0%}", f"{one['one_hop']:.4f}", f"{one['two_hops']:.4f}"] for one in stored("code_errors")["slopes"]]
    return in_table(["variance in common", "slope, one hop", "slope, two hops"], lines)


def senders() -> str:
    """What is left of the variance of the same values by many senders."""
    found = stored("code_errors")
    return in_table(
        [f"{found['senders']} senders", "variance left"], [[name, f"{error:.3f}"] for name, error in found["senders_error"].items()]
    )


def manifests(name: str) -> str:
    return reshard.checkpoint_table([reshard.Checkpoint(**one) for one in stored(name)["checkpoints"]])


TABLES: dict[str, Callable[[], str]] = {
    "integer_codes": integer_codes,
    "gaussian_codes": lambda: quantization.table([quantization.Result(**row) for row in rows_of("gaussian_cpu")]),
    "dropout": lambda: dropout.table([dropout.Result(**row) for row in rows_of("dropout_cpu")]),
    **{
        name: partial(steps, name)
        for name in ("train_step", "train_step_small", "train_step_host", "train_step_deepspeed", "train_step_tensor")
    },
    "checkpoint": saving,
    "save_copies": lambda: save_copies.table([save_copies.Result(**row) for row in rows_of("save_copies")]),
    "resharded_manifests": partial(manifests, "reshard"),
    "resharded_manifests_4096": partial(manifests, "reshard_4096"),
    **{f"scale_{part.replace('-', '_')}": partial(lambda table: table(stored("scale")), table) for part, table in scale.TABLES.items()},
    "resharded_loads": lambda: reshard.load_table([reshard.Load(**one) for one in stored("reshard")["loads"]]),
    "preprocessing": preprocessing,
    "preprocessing_memory": preprocessing_memory,
    "indices": indices,
    "head_loss": lambda: head_loss.table([head_loss.Result(**row) for row in rows_of("head_loss")]),
    "host_adam": lambda: host_adam.table([host_adam.Result(**row) for row in rows_of("host_adam")]),
    "sockets": lambda: sockets.table([sockets.Result(**row) for row in rows_of("sockets_cpu")]),
    "long_sequences": sequences,
    "h100_runs": lambda: gpu_table.run_table(stored("gpu_h100")),
    "h100_variants": lambda: gpu_table.variant_table(stored("gpu_h100")),
    "h100_kinds": kinds_of_work,
    "h100_kernels": lambda: gpu_table.kernel_table(stored("gpu_h100")),
    "fake_gpu_memory": lambda: "\n".join(gpu_host_path.memory_table(host_path("gpu_host_path"))),
    "fake_gpu_calls": lambda: "\n".join(gpu_host_path.calls_table(host_path("gpu_host_path"))),
    "fake_gpu_calls_before": lambda: "\n".join(gpu_host_path.calls_table(host_path("gpu_host_path_before"))),
    "slow_links_2x2": partial(speedups, "2x2"),
    "slow_links_4x2": partial(speedups, "4x2"),
    "slow_links_parts": parts_of_the_speedup,
    "slow_links_bytes": models_into_a_node,
    "beside_deepspeed": beside_deepspeed,
    "minutes_to_loss": lambda: time_report.minutes_to_loss(findings()),
    "loss_by_tokens": lambda: time_report.loss_by_tokens(findings()),
    "step_seconds": lambda: time_report.step_seconds(findings()),
    "whole_runs": lambda: time_report.whole_runs(findings()),
    "loss": partial(losses, "loss_parity"),
    "loss_islands": partial(losses, "loss_islands"),
    "loss_wide": partial(losses, "loss_parity_wide"),
    "loss_models": models_of_the_study,
    "loss_pairs": partial(seed_by_seed, "loss_parity", PAIRS),
    "loss_islands_pair": partial(seed_by_seed, "loss_islands", ISLAND_PAIRS),
    "islands_by_rate": islands_by_rate,
    "islands_at_their_best": islands_at_their_best,
    "levels": levels,
    "code_errors": errors_of_codes,
    "code_slopes": slopes,
    "code_senders": senders,
}
