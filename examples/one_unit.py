"""Prints every payload of one step of ZeRO++: a unit of 12 weights on two nodes of two ranks. docs/worked_example.md explains the output.

The ranks are threads of this process. Change the numbers and run it again:

    python -m examples.one_unit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_zpp.comm.backend import Backend, VirtualWorld, Work
from megatron_zpp.comm.code import EXACT, Code, SliceShape
from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.codecs import make_codec
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.comm.links import INTER_CLIMB, INTER_DESCEND, INTRA_CLIMB, INTRA_DESCEND
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Lane, Link
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import ZEROPP
from megatron_zpp.zero.shard import shard

# One row per slice. Each row is a parameter of its own, because every parameter begins a block, and a slice is one block here.
WEIGHTS = [[1.984375, 0.5, -0.3], [-0.9921875, 0.25, 0.1], [3.96875, -1.5, 0.203125], [1.0, -0.7, 0.01]]
GRADIENTS = [  # of each rank
    [[7.0, 2.0, -1.0], [0.0, 7.0, -7.0], [1.75, -1.0, 0.5], [-7.0, 3.4375, 0.0]],
    [[3.5, 1.0, -0.5], [0.0, -7.0, 7.0], [0.25, 1.0, 1.75], [-7.0, 0.5, 2.5]],
    [[7.0, -4.0, 2.25], [2.0, 4.0, -14.0], [7.0, 7.0, 7.0], [0.0, 0.0, 0.0]],
    [[7.0, 0.0, 1.0], [-2.0, 4.0, 14.0], [-7.0, -3.0, 0.0], [14.0, -4.0, 2.0]],
]
GRADIENTS_16 = torch.tensor(GRADIENTS).bfloat16().float()
LEARNING_RATE = 0.1
GRID = Grid.of_nodes(nodes=2, ranks_per_node=2)
LADDER = GRID.ladder
OWN, BLOCK = 3, 32  # weights of a slice, and the smallest block, which padding fills up
SHAPE = SliceShape(BLOCK, 0)
OPTIONS = EngineOptions(ZEROPP, dtype=torch.bfloat16, block_numel=BLOCK)


class Unit(nn.Module):
    """The sum of weights times factors, so the gradient of a weight is its factor."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.tensor([row]) for row in WEIGHTS)
        self.seen = torch.empty(0)

    def forward(self, factors: Tensor) -> Tensor:
        rows = torch.cat(list(self.rows))
        self.seen = rows.detach().clone()
        return (rows.float() * factors).sum()


@dataclass
class RecordingBackend:
    """The collectives of `backend`. sent: what this rank gave to each lane's collectives, as bytes."""

    backend: Backend
    sent: dict[Lane, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.grid = self.backend.rank, self.backend.grid

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        self.sent.setdefault(lane, []).append(own.clone())
        return self.backend.all_gather(lane, output, own)

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        self.sent.setdefault(lane, []).append(sent.clone())
        return self.backend.exchange(lane, output, sent)

    def gather_world(self, own: Tensor) -> Tensor:
        return self.backend.gather_world(own)


@dataclass(frozen=True)
class Step:
    """One rank's numbers. seen: weights in forward. mean, weights: mean gradients of the own slice, and its main weights after the step."""

    sent: dict[Lane, list[Tensor]]
    seen: Tensor
    mean: Tensor
    norm: float
    weights: Tensor
    received: dict[Category, Traffic]

    def payloads(self, lane: Lane) -> Tensor:
        """[slices, bytes]: what this rank sent over `lane`, or kept for itself, in this step."""
        slices = {INTER_CLIMB: 1, INTRA_CLIMB: LADDER.partitions, INTRA_DESCEND: LADDER.data_ranks, INTER_DESCEND: LADDER.partitions}
        return self.sent[lane][0].view(slices[lane], -1)


def train(backend: Backend) -> Step:
    """One step on one rank."""
    recording = RecordingBackend(backend)
    unit = Unit()
    engine = shard(nn.Sequential(unit), ["0"], OPTIONS, backend=recording)
    engine.backward(engine.module(torch.tensor(GRADIENTS[engine.data_rank])))
    engine.finish_gradients()
    mean = engine.gradients[0].total[:OWN].clone()
    norm = engine.update(LEARNING_RATE).grad_norm
    received = {category: engine.links.ledger.total(category) for category in (Category.WEIGHTS, Category.GRADIENTS)}
    step = Step(recording.sent, unit.seen, mean, norm, engine.units[0].main_weight[:OWN].clone(), received)
    engine.close()
    return step


def decoded_mean(payloads: Tensor, bits: int) -> Tensor:
    """The fp32 mean of payloads [members, bytes] of one slice."""
    mean = Regions.of(torch.empty(BLOCK), SHAPE)
    make_codec(Code(bits), OPTIONS.dtype, BLOCK).decode_mean_into(payloads.unsqueeze(1), mean, accumulate=False)
    return mean.blocks[0, :OWN]


def coded(payload: Tensor, bits: int) -> list[str]:
    """The codes, the scale and the bytes of a payload, as cells."""
    codes_bytes, shown = BLOCK * bits // 8, -(-OWN * bits // 8)
    codes, rest = payload[:codes_bytes].tolist(), payload[codes_bytes:]
    if any(codes[shown:]):
        raise RuntimeError("the codes of padding are not 0")
    digits = [digit for byte in codes for digit in ((byte,) if bits == 8 else (byte & 15, byte >> 4))]
    signed = [str(digit - (1 << bits) if digit >> (bits - 1) else digit) for digit in digits[:OWN]]
    scale = f"{rest[:4].view(torch.float32).item():.7g}"
    return [*signed, scale, f"{_bytes(codes[:shown])} +{codes_bytes - shown} | {_bytes(rest[:4].tolist())} +{len(rest) - 4}"]


def _bytes(values: Iterable[int]) -> str:
    return " ".join(f"{value:02x}" for value in values)


def numbers(values: Tensor | Sequence[float]) -> list[str]:
    return [f"{value:.7g}" for value in torch.as_tensor(values).tolist()]


def table(title: str, header: str, rows: Iterable[Sequence[object]]) -> str:
    """The title, then lines of right-aligned columns. header: the names of the columns, "-" for none."""
    lines = [["" if name == "-" else name for name in header.split()], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    joined = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join([title, *joined])


def ranks_with_the_first(by_rank: Sequence[object]) -> str:
    """The ranks that have what rank 0 has."""
    return " ".join(str(rank) for rank, value in enumerate(by_rank) if value == by_rank[0])


def climb(steps: Sequence[Step]) -> Iterator[str]:
    """The weights on their way up."""
    ranks = [(rank, LADDER.slice_of(rank)) for rank in range(LADDER.data_ranks)]
    yield table("1  main weights", "rank slice fp32 - -", ([rank, own, *numbers(WEIGHTS[own])] for rank, own in ranks))
    up = ([rank, own, *coded(steps[rank].payloads(INTER_CLIMB)[0], 8)] for rank, own in ranks)
    yield table("2  up between the nodes", "rank slice codes - - scale bytes", up)
    secondary = (
        [rank, LADDER.slice_of(other), *coded(payload, 8)]
        for rank, _ in ranks
        for other, payload in zip(LADDER.members(Link.INTER, rank), steps[rank].payloads(INTRA_CLIMB), strict=True)
    )
    yield table("3  secondary rungs, which go up inside each node", "rank slice codes - - scale bytes", secondary)
    seen = steps[0].seen.float()
    errors = seen - torch.tensor(WEIGHTS)
    full = ([index, *numbers(row), *numbers(errors[index])] for index, row in enumerate(seen))
    alike = ranks_with_the_first([step.seen.tolist() for step in steps])
    yield table(f"4  full rung, the same on ranks {alike}", "slice bf16 - - error - -", full)


def descent(steps: Sequence[Step]) -> Iterator[str]:
    """The gradients on their way down."""
    gradients = ([rank, index, *numbers(row)] for rank, rows in enumerate(GRADIENTS_16) for index, row in enumerate(rows))
    yield table("5  gradients", "rank slice bf16 - -", gradients)
    within = (
        [rank, LADDER.members(Link.INTRA, rank)[index // LADDER.partitions], index, *coded(payload, 4)]
        for rank, step in enumerate(steps)
        for index, payload in enumerate(step.payloads(INTRA_DESCEND))
    )
    yield table("6  down inside each node", "from to slice codes - - scale bytes", within)
    yield table("7  means of a node, which go down between the nodes", "from to slice mean - - codes - - scale bytes", _means(steps))


def _means(steps: Sequence[Step]) -> Iterator[list[object]]:
    for rank, step in enumerate(steps):
        node = LADDER.members(Link.INTRA, rank)
        for to, payload in zip(LADDER.members(Link.INTER, rank), step.payloads(INTER_DESCEND), strict=True):
            index = LADDER.slice_of(to)
            received = torch.stack([steps[member].payloads(INTRA_DESCEND)[index] for member in node])
            yield [rank, to, index, *numbers(decoded_mean(received, 4)), *coded(payload, 4)]


def update(steps: Sequence[Step]) -> Iterator[str]:
    """What the owners of the slices do with them."""
    ranks = [(rank, LADDER.slice_of(rank), step) for rank, step in enumerate(steps)]
    true = GRADIENTS_16.mean(0)
    means = ([rank, own, *numbers(step.mean), *numbers(true[own])] for rank, own, step in ranks)
    yield table("8  mean gradients", "rank slice fp32 - - true - -", means)
    yield f"norm, the same on ranks {ranks_with_the_first([step.norm for step in steps])}: {steps[0].norm:.7g}"
    updated = ([rank, own, *numbers(step.weights)] for rank, own, step in ranks)
    yield table("9  main weights after the step", "rank slice fp32 - -", updated)


def received(steps: Sequence[Step]) -> str:
    """What a rank received."""
    up, down = steps[0].received[Category.WEIGHTS], steps[0].received[Category.GRADIENTS]
    hops = (
        ("up between", up.inter_bytes, 8, LADDER.partitions - 1),
        ("up inside", up.intra_bytes, 8, LADDER.data_ranks - LADDER.partitions),
        ("down inside", down.intra_bytes, 4, LADDER.data_ranks - LADDER.partitions),
        ("down between", down.inter_bytes, 4, LADDER.partitions - 1),
    )
    rows = []
    for name, ledger, bits, slices in hops:
        codes, uncoded = slices * BLOCK * bits // 8, slices * EXACT.payload_bytes(SHAPE, element_bytes=2)
        rows.append([name, ledger, codes, ledger - codes, uncoded, ledger / uncoded])
    alike = ranks_with_the_first([step.received for step in steps])
    return table(f"10  bytes received, the same on ranks {alike}", "hop ledger codes scales bf16 share", rows)


steps = VirtualWorld(GRID).run(train)
print("\n\n".join([*climb(steps), *descent(steps), *update(steps), received(steps)]))
