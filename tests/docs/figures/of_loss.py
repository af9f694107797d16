"""Figures of what codes cost: in loss (benchmarks/loss_parity.py) and in errors of values (benchmarks/code_errors.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import code_errors
from figures.figure import SAYS, Figure
from figures.results import NARROW, WIDE, above, gaps, outcomes, results, rounded_up, seed_by_seed, spread
from loss_study.report import table

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.data.tokenizers.tokenizer import padded_vocab_size
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.ops.gaussian_reference import LEVELS, THRESHOLDS
from megatron_zpp.ops.payload import gaussian_bytes

README, ZEROPP, NUMERICS, BENCHMARKS, CHANGES = "README.md", "docs/zeropp.md", "docs/numerics.md", "benchmarks/README.md", "CHANGELOG.md"
AGAIN = "ZeRO-3 again, rates times 1 + 1e-6"
ONE_BIT, HALF = "lean, 1-bit differences", ", half the rate"


def million_parameters(study: str = NARROW) -> float:
    """Of the model that the study trains."""
    flags = results(study)["flags"]
    config = resolve(parse_flags(f"{flags} --zero-stage 3".split()), 4, 2)
    return parameter_count(config.model, padded_vocab_size(config.data.vocab_size or 1, config.model.make_vocab_size_divisible_by)) / 1e6


def iterations() -> int:
    words = results("loss_parity")["flags"].split()
    return int(words[words.index("--train-iters") + 1])


def seeds(name: str, study: str = NARROW) -> int:
    return len(gaps(study)[name].percents)


def joined(*pairs: Iterable[float]) -> list[float]:
    return [value for pair in pairs for value in pair]


def left_by_levels(bits: int) -> float:
    """D: the share of a Gaussian's variance that its levels leave, 1 - E(q^2), because levels are means."""
    edges = (0.0, *THRESHOLDS[bits], math.inf)
    below = [math.erf(edge / math.sqrt(2)) for edge in edges]  # of |y|
    return 1 - sum((high - low) * level**2 for (low, high), level in zip(pairwise(below), LEVELS[bits], strict=True))


def relative(share: float) -> float:
    return share / (1 - share)


def block_errors() -> str:
    return code_errors.table([code_errors.BlockError(**one) for one in results("code_errors")["errors"]])


def slopes(way: str) -> list[float]:
    return [one[way] for one in results("code_errors")["slopes"]]


def two_copies(bits: int) -> float:
    """Bytes between nodes, in M, of weights and gradients in Gaussian codes: each crosses once."""
    return 2 * gaussian_bytes(8 * 256, bits) / (8 * 256) / 2


def scales_add(k: float) -> float:
    """Percent that the fp32 scale of 256 integers adds to the bytes of ZeRO++ with k micro-batches."""
    scale = 4 / 256 / 2  # in values of 16 bits
    return 100 * (scale + k * scale) / (0.5 + 0.25 * k)


def gelu_difference() -> float:
    """The largest difference between GELU and its form with tanh."""
    places = (step / 1000 for step in range(6000))
    return max(x / 2 * abs(math.erf(x / math.sqrt(2)) - math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in places)


FIGURES = (
    Figure("docs/architectures.md", "The two differ by at most {:.0f}e-4.", lambda: [rounded_up(1e4 * gelu_difference())]),
    Figure(README, "The scales of quantized blocks add {:.0f} to {:.0f} % to its bytes.", lambda: (scales_add(1), scales_add(1000))),
    Figure(
        README,
        "{} seeds of a model of {:.2f} million parameters, {} steps, 95 % intervals, beside ZeRO-3: lean ends {:.2f} ± {:.2f} % "
        "higher, ZeRO++ "
        "{:.2f} ± {:.2f} % lower.",
        lambda: (SAYS[seeds("lean")].capitalize(), million_parameters(), iterations(), *joined(above("lean"), above("paper", -1))),
    ),
    Figure(
        README,
        "At half the learning rate ({} seeds) lean ends {:.2f} ± {:.2f} % higher, ZeRO++ {:.2f} ± {:.2f} % higher.",
        lambda: (SAYS[seeds(f"lean{HALF}")], *joined(above(f"lean{HALF}"), above(f"paper{HALF}"))),
    ),
    Figure(
        README,
        "With {:.1f} million parameters ({} seeds) lean ends {:.2f} ± {:.2f} % higher, ZeRO++ {:.2f} ± {:.2f} %",
        lambda: (million_parameters(WIDE), seeds("lean", WIDE), *joined(above("lean", study=WIDE), above("paper", study=WIDE))),
    ),
    Figure(
        NUMERICS,
        "{:.1f} million parameters, at a learning rate of 1.5e-3.",
        lambda: [million_parameters(WIDE)],
    ),
    Figure(NUMERICS, "{}", lambda: [table(list(gaps(WIDE).values()))]),
    Figure(
        NUMERICS,
        "Here `lean` ends {:.2f} ± {:.2f} % above ZeRO-3, and `paper` {:.2f} ± {:.2f} %: both intervals include 0. Single gaps range from "
        "{:.1f} % to +{:.1f} %",
        lambda: (
            *joined(above("lean", study=WIDE), above("paper", study=WIDE)),
            *spread([percent for gap in gaps(WIDE).values() for percent in gap.percents]),
        ),
    ),
    Figure(
        ZEROPP,
        "with a model of {:.2f} million parameters: {} steps, {} seeds, validation loss beside ZeRO-3, 95 % intervals. Lean "
        "ends {:.2f} ± {:.2f} % "
        "higher, ZeRO++ {:.2f} ± {:.2f} % lower.",
        lambda: (million_parameters(), iterations(), SAYS[seeds("lean")], *joined(above("lean"), above("paper", -1))),
    ),
    Figure(
        ZEROPP,
        "With differences in 1 bit lean ends {:.2f} ± {:.2f} % higher, so 3 bits are the default. At half the learning rate ({} "
        "seeds) lean ends "
        "{:.2f} ± {:.2f} % higher, ZeRO++ {:.2f} ± {:.2f} % higher",
        lambda: (*above(ONE_BIT), SAYS[seeds(f"lean{HALF}")], *joined(above(f"lean{HALF}"), above(f"paper{HALF}"))),
    ),
    Figure(ZEROPP, "because the scales of blocks are not in them ({:.0f} to {:.0f} %).", lambda: (scales_add(1), scales_add(1000))),
    Figure(
        NUMERICS,
        "trained a GPT of {:.2f} million parameters on the bytes of Python's standard library",
        lambda: [million_parameters()],
    ),
    Figure(NUMERICS, "{}", lambda: [table(list(gaps().values()))]),
    Figure(
        NUMERICS,
        "ends within {} % of the plain run, {:.2f} % on average.",
        lambda: (rounded_up(max(map(abs, gaps()[AGAIN].percents)), 1), above(AGAIN, -1)[0]),
    ),
    Figure(
        NUMERICS,
        "single gaps range from {:.1f} % to +{:.1f} %.",
        lambda: spread([percent for gap in gaps().values() for percent in gap.percents]),
    ),
    Figure(
        NUMERICS,
        "**`lean` costs {:.2f} ± {:.2f} % at this rate and {:.2f} ± {:.2f} % at half of it: its interval is below {} %, and "
        "does not include 0. With "
        "1-bit differences it costs {:.2f} ± {:.2f} % and {:.2f} ± {:.2f} %.**",
        lambda: (
            *joined(above("lean"), above(f"lean{HALF}")),
            rounded_up(max(sum(above("lean")), sum(above(f"lean{HALF}"))), 1),
            *joined(above(ONE_BIT), above(ONE_BIT + HALF)),
        ),
    ),
    Figure(
        NUMERICS,
        "1-bit differences are {:.2f} ± {:.2f} % above 3-bit ones, and {:.2f} ± {:.2f} % at half the rate.",
        lambda: joined(seed_by_seed(ONE_BIT, "lean"), seed_by_seed(ONE_BIT + HALF, f"lean{HALF}")),
    ),
    Figure(
        NUMERICS,
        "it has the loss of ZeRO-3 ({:.2f} ± {:.2f} % less, seed by seed)",
        lambda: seed_by_seed("lean, gradients in 16 bits", "lean", -1),
    ),
    Figure(
        NUMERICS,
        "Two rounds of rotation for gradients ({:+.2f} ± {:.2f} %) and a fourth bit ({:+.2f} ± {:.2f} %) may help",
        lambda: joined(seed_by_seed("lean, two rounds for gradients", "lean"), seed_by_seed("lean, gradients in 4 bits", "lean")),
    ),
    Figure(
        NUMERICS,
        "`paper` ends {:.2f} ± {:.2f} % *below* ZeRO-3, so `lean` is {:.2f} ± {:.2f} % above it.",
        lambda: joined(above("paper", -1), seed_by_seed("lean", "paper")),
    ),
    Figure(
        NUMERICS,
        "has the loss of `paper` ({:+.2f} ± {:.2f} %).",
        lambda: seed_by_seed("lean, 8/4-bit absmax gradients, not rotated", "paper"),
    ),
    Figure(
        NUMERICS,
        "`lean` and `paper` are {:.2f} ± {:.2f} % apart; but half the rate costs this model {:.0f} %",
        lambda: (*seed_by_seed(f"lean{HALF}", f"paper{HALF}"), 100 * (gaps()[f"ZeRO-3{HALF}"].mean_loss / gaps()["ZeRO-3"].mean_loss - 1)),
    ),
    Figure(
        NUMERICS,
        "do as well as own signs at two nodes ({:+.2f} ± {:.2f} %).",
        lambda: seed_by_seed("lean, signs shared by senders", "lean"),
    ),
    Figure(
        BENCHMARKS,
        "A run takes {:.0f} to {:.0f} s of processor time on a core that others use too, with the C++ kernels.",
        lambda: spread([one.cpu_seconds for one in outcomes()]),
    ),
    # Codes
    Figure(
        NUMERICS,
        "the slope of the result against the true mean was {:.3f} to {:.3f} with two ranks in a partition and blocks of 256, "
        "depending on how much "
        "the ranks' gradients have in common; over a single hop it was within {} of 1 (",
        lambda: (*spread(slopes("two_hops")), rounded_up(max(abs(one - 1) for one in slopes("one_hop")), 3)),
    ),
    Figure(
        NUMERICS,
        "the share D of a Gaussian's variance: {:.3f}, {:.4f}, {:.4f} and {:.4f} with 1, 2, 3 and 4 bits.",
        lambda: [left_by_levels(bits) for bits in LEVELS],
    ),
    Figure(
        NUMERICS,
        "D / (1 - D) of the block: {:.3f}, {:.3f}, {:.4f} and {:.4f}.",
        lambda: [relative(left_by_levels(bits)) for bits in LEVELS],
    ),
    Figure(
        NUMERICS,
        "On Gaussian values the codec has {:.3f}, {:.3f}, {:.4f} and {:.4f}",
        lambda: results("code_errors")["gaussian_errors"].values(),
    ),
    Figure(
        NUMERICS,
        "by {:.0f} % with 1 bit, by {:.1f} % with 3.",
        lambda: [100 * left_by_levels(bits) for bits in (1, 3)],
    ),
    Figure(NUMERICS, "{}", lambda: [block_errors()]),
    Figure(
        NUMERICS,
        "{} senders of the same values in 3 bits leave {:.3f} of their variance instead of {:.3f}.",
        lambda: (results("code_errors")["senders"], *results("code_errors")["senders_error"].values()),
    ),
    Figure(
        NUMERICS,
        "r / (1 - r) of u^2 of the main weights: {:.3f}, {:.2f} and {:.1f} with 3, 2 and 1 bits.",
        lambda: [relative(relative(left_by_levels(bits))) for bits in (3, 2, 1)],
    ),
    Figure(NUMERICS, "`--zeropp lean` moves 2 (3/16 + 1/256) = {:.3f}M", lambda: [two_copies(3)]),
)
