"""Measures what codes lose: errors and bias of the Gaussian codes on blocks of several kinds, and the slope of a mean in 4 bits.

    python -m benchmarks.code_errors --output benchmarks/results/code_errors.json

Nothing here depends on the machine: all draws have fixed seeds, and kernels and reference have the same bits. The error of a block is the
mean of sum (x' - x)^2 / sum x^2 over draws of the signs. Its squared bias is the same of the mean of x', without what the number of draws
leaves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import report
from megatron_zpp.ops import extension
from megatron_zpp.ops.gaussian import decode_gaussian, decode_mean_gaussian, encode_gaussian
from megatron_zpp.ops.payload import coded_bytes, gaussian_bytes
from megatron_zpp.ops.quantization import decode_mean_blocks, encode_blocks

BLOCK = 256
BITS = (1, 2, 3, 4)
SHOWN_BIAS = 1e-4
SENDERS = 32
COMMON_SHARES = (0.0, 0.5, 0.9)  # of the variance of gradients: what ranks have in common


@dataclass(frozen=True)
class BlockError:
    block: str
    bits: int
    rounds: int
    error: float
    squared_bias: float


@dataclass(frozen=True)
class Slope:
    """The slope of the mean that arrives against the true mean, after one hop of 4 bits and after two."""

    common_share: float
    one_hop: float
    two_hops: float


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed() -> Tensor:
    return normal(BLOCK, seed=1) / (normal(2, BLOCK, seed=2).square().sum(0) / 2).sqrt()


def with_values(values: Mapping[int, float]) -> Tensor:
    """values: by place; the others are 0."""
    block = torch.zeros(BLOCK)
    for place, value in values.items():
        block[place] = value
    return block


BLOCKS: dict[str, Callable[[], Tensor]] = {
    "Gaussian": lambda: normal(BLOCK),
    "Student's t, 2 degrees of freedom": heavy_tailed,
    "1, -2, 0.5 and 1.5, the others 0": lambda: with_values({3: 1.0, 77: -2.0, 130: 0.5, 255: 1.5}),
    "1 and 0.3, the others 0": lambda: with_values({0: 1.0, 1: 0.3}),
}


def crossed(values: Tensor, bits: int, rounds: int, key: int) -> Tensor:
    """What arrives of `values` [slices, numel]."""
    payloads = torch.zeros(values.shape[0], gaussian_bytes(values.shape[1], bits), dtype=torch.uint8)
    encode_gaussian(values, payloads, bits=bits, rounds=rounds, key=key)
    arrived = torch.empty_like(values)
    decode_gaussian(payloads, arrived, bits=bits, rounds=rounds, keys=[key] * values.shape[0])
    return arrived


def share(error: Tensor, values: Tensor) -> float:
    return float(error.double().square().sum() / values.double().square().sum())


def block_error(name: str, bits: int, rounds: int, draws: int) -> BlockError:
    values = BLOCKS[name]().view(1, -1)
    arrived = torch.cat([crossed(values, bits, rounds, key) for key in range(draws)]).double()
    error = share(arrived - values.double(), values.double().expand_as(arrived))
    of_mean = share(arrived.mean(0, keepdim=True) - values.double(), values)
    return BlockError(name, bits, rounds, error, max(0.0, (of_mean - error / draws) / (1 - 1 / draws)))


def gaussian_error(bits: int, blocks: int) -> float:
    """The error on many Gaussian values, with one round."""
    values = normal(1, blocks * BLOCK, seed=3)
    return share(crossed(values, bits, 1, key=1) - values, values)


def senders_error(bits: int, has_own_signs: bool, blocks: int) -> float:
    """The error of the mean of SENDERS senders that have the same values."""
    values = normal(1, blocks * BLOCK, seed=4)
    keys = list(range(SENDERS)) if has_own_signs else [0] * SENDERS
    payloads = torch.zeros(SENDERS, 1, gaussian_bytes(values.shape[1], bits), dtype=torch.uint8)
    for payload, key in zip(payloads, keys, strict=True):
        encode_gaussian(values, payload, bits=bits, rounds=1, key=key)
    mean = torch.empty_like(values)
    decode_mean_gaussian(payloads, mean, bits=bits, rounds=1, keys=keys, accumulate=False)
    return share(mean - values, values)


def mean_in_4_bits(members: Sequence[Tensor]) -> Tensor:
    """The mean of what arrives of values [1, run] in integer codes with blocks of 256."""
    payloads = torch.zeros(len(members), 1, coded_bytes(members[0].shape[1], 4, BLOCK), dtype=torch.uint8)
    for payload, values in zip(payloads, members, strict=True):
        encode_blocks(values, payload, bits=4, block_numel=BLOCK)
    mean = torch.empty_like(members[0])
    decode_mean_blocks(payloads, mean, bits=4, block_numel=BLOCK, accumulate=False)
    return mean


def slope(common_share: float, blocks: int) -> Slope:
    """Two partitions of two ranks."""
    common = normal(1, blocks * BLOCK, seed=5) * common_share**0.5
    ranks = [common + normal(1, blocks * BLOCK, seed=6 + rank) * (1 - common_share) ** 0.5 for rank in range(4)]
    inside = [mean_in_4_bits(ranks[:2]), mean_in_4_bits(ranks[2:])]
    one_hop = of_regression(inside[0], torch.stack(ranks[:2]).double().mean(0))
    return Slope(common_share, one_hop, of_regression(mean_in_4_bits(inside), torch.stack(ranks).double().mean(0)))


def of_regression(result: Tensor, true_mean: Tensor) -> float:
    return float((result.double() * true_mean).sum() / true_mean.square().sum())


def table(errors: Sequence[BlockError]) -> str:
    lines = [
        "| block | 1 bit, one round | two | 2 bits, one round | two | 3 bits, one round | two |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in BLOCKS:
        cells = [_cell(one) for one in errors if one.block == name and one.bits < 4]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: BlockError) -> str:
    return _digits(one.error) + (f" ({_digits(one.squared_bias)})" if one.squared_bias >= SHOWN_BIAS else "")


def _digits(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else f"{value:.4f}"


def main(arguments: list[str]) -> None:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    extension.load()
    errors = [block_error(name, bits, rounds, options.draws) for name in BLOCKS for bits in BITS for rounds in (1, 2)]
    figures = {
        "errors": [asdict(one) for one in errors],
        "gaussian_errors": {str(bits): gaussian_error(bits, options.blocks) for bits in BITS},
        "senders_error": {name: senders_error(3, own, options.blocks) for name, own in (("own signs", True), ("same signs", False))},
        "slopes": [asdict(slope(common, options.blocks)) for common in COMMON_SHARES],
    }
    setting = {"draws": options.draws, "blocks": options.blocks, "senders": SENDERS}
    others = "\n".join(f"{name}: {found}" for name, found in figures.items() if name != "errors")
    report("code_errors", arguments, setting, f"{table(errors)}\n\n{others}", figures, options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4096, help="of the signs, for each block (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=4096, help="of Gaussian values (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
