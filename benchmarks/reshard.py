"""Measures what it takes to find a rank's elements in a checkpoint that was saved in another world.

    python -m benchmarks.reshard --output benchmarks/results/reshard.json
    python -m benchmarks.reshard --ranks 4096 --rounds 1 --output benchmarks/results/reshard_4096.json

The model has the shapes of Llama 3 70B: 80 blocks, hidden size 8192, 64 heads in 8 groups, 28672 channels, 128256 words. The manifests are
those of --ranks ranks at ZeRO-3 with three states in fp32; there are no tensors. T tensor ranks divide the parameters, and D data ranks
divide the part of each: qkv, gate, value, head and embedding by rows, projection and down by columns, gains not at all. The figures of a
load are those of the worst of the first, the middle and the last rank. Seconds are of one core.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from benchmarks.report import report
from megatron_zpp.checkpoint.manifest import (
    CHUNK_BYTES,
    ELEMENT_BYTES,
    ELEMENT_TYPE,
    MANIFEST_FILE,
    MARKER_FILE,
    Manifest,
    StoredFile,
    StoredPiece,
    marker_json,
    read_manifest,
)
from megatron_zpp.checkpoint.reshard import PieceIndex, chunk_ranges
from megatron_zpp.checkpoint.shard_file import TensorEntry, lay_out
from megatron_zpp.checkpoint.source import Source, byte_ranges
from megatron_zpp.checkpoint.verified_file import CHUNKS_AT_ONCE
from megatron_zpp.parallel.division import Division, HeldRange, Stripe
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.parallel.stripes import columns_of
from megatron_zpp.zero.layout import FlatLayout

BLOCKS, HIDDEN, HEADS, GROUPS, CHANNELS, FFN, VOCABULARY = 80, 8192, 64, 8, 128, 28672, 128256
BLOCK_NUMEL = 256
STATES = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), ELEMENT_TYPE)
STATE_BYTES = ELEMENT_BYTES[ELEMENT_TYPE]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Param:
    """A parameter of a unit. division: by rows, by columns, by the rows of gate and value, or none."""

    name: str
    shape: tuple[int, ...]
    division: str

    def part(self, tensor_ranks: int, tensor_rank: int) -> Division:
        """What a tensor rank has of it."""
        if self.division == "none":
            return Division.undivided(self.shape, tensor_ranks, tensor_rank)
        if self.division != "gate and value":
            return Division.evenly(self.shape, 0 if self.division == "rows" else 1, tensor_ranks, tensor_rank)
        length = self.shape[0] // (2 * tensor_ranks)
        ranges = tuple(HeldRange(index * length, (index + 1) * length, (index % tensor_ranks,)) for index in range(2 * tensor_ranks))
        return Division(self.shape, 0, ranges, tensor_rank)


@dataclass(frozen=True)
class World:
    """T tensor ranks times D data ranks. ranks: of both."""

    tensor_ranks: int
    ranks: int

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.tensor_ranks

    def __str__(self) -> str:
        return f"{self.tensor_ranks} x {self.data_ranks}"


BLOCK = (
    Param("attention_norm.weight", (HIDDEN,), "none"),
    Param("attention.qkv.weight", ((HEADS + 2 * GROUPS) * CHANNELS, HIDDEN), "rows"),
    Param("attention.projection.weight", (HIDDEN, HEADS * CHANNELS), "columns"),
    Param("mlp_norm.weight", (HIDDEN,), "none"),
    Param("mlp.up.weight", (2 * FFN, HIDDEN), "gate and value"),
    Param("mlp.down.weight", (HIDDEN, FFN), "columns"),
)
UNITS = (
    ("embedding", (Param("word.weight", (VOCABULARY, HIDDEN), "rows"),)),
    *((f"blocks.{index}", BLOCK) for index in range(BLOCKS)),
    ("final", (Param("norm.weight", (HIDDEN,), "none"),)),
    ("head", (Param("weight", (VOCABULARY, HIDDEN), "rows"),)),
)
SHAPES = {f"{unit}.{param.name}": param.shape for unit, params in UNITS for param in params}
CASES = {1: (1, 8), 8: (8, 4, 1)}  # tensor ranks that saved, and those that load


@cache
def stripes_of(params: Sequence[Param], world: World, rank: int) -> Sequence[tuple[str, Stripe, bool]]:
    """The stripes of a unit that a rank has in its slice: the name of the parameter, and whether this rank saves it."""
    data_rank, tensor_rank = divmod(rank, world.tensor_ranks)
    parts = {param.name: param.part(world.tensor_ranks, tensor_rank) for param in params}
    layout = FlatLayout([_spec(name, part) for name, part in parts.items()], world.data_ranks, BLOCK_NUMEL)
    return [
        (segment.spec.name, placed.stripe, tensor_rank == 0 or not any(parts[segment.spec.name].shared()))
        for segment in layout.segments(data_rank, 1)
        for placed in parts[segment.spec.name].stripes(segment.start, segment.stop)
    ]


def _spec(name: str, part: Division) -> ParamSpec:
    def no_values(start: int, stop: int) -> object:
        raise NotImplementedError("this model has no values")

    return ParamSpec(name, part, no_values, weight_decay=True)  # type: ignore[arg-type]


def elements_of(world: World, rank: int) -> Iterator[tuple[str, str, Stripe, bool]]:
    """Everything that a rank has: parameter, state, stripe, and whether it saves it."""
    for unit, params in UNITS:
        for state in STATES:
            for name, stripe, is_saved in stripes_of(params, world, rank):
                yield f"{unit}.{name}", state, stripe, is_saved


def manifest_of(world: World) -> Manifest:
    """The manifest of a checkpoint that `world` has saved."""
    checksums = random.Random(1)
    files, pieces = [], []
    for rank in range(world.ranks):
        name = f"rank_{rank:05d}.safetensors"
        saved = [(parameter, state, stripe) for parameter, state, stripe, is_saved in elements_of(world, rank) if is_saved]
        entries = [TensorEntry(f"{name}.{state}.{stripe.start}", ELEMENT_TYPE, (stripe.numel,)) for name, state, stripe in saved]
        layout = lay_out(entries)
        offsets: dict[tuple[str, Stripe], dict[str, int]] = defaultdict(dict)
        for (parameter, state, stripe), offset in zip(saved, layout.offsets, strict=True):
            offsets[parameter, stripe][state] = offset
        for (parameter, stripe), by_state in offsets.items():
            columns = None if stripe.columns == columns_of(SHAPES[parameter]) else stripe.columns
            pieces.append(StoredPiece(parameter, stripe.start, stripe.stop, name, by_state, columns))
        chunks = -(-layout.nbytes // CHUNK_BYTES)
        files.append(StoredFile(name, layout.nbytes, len(layout.header), tuple(checksums.getrandbits(32) for _ in range(chunks))))
    manifest = Manifest(1, 1, SHAPES, STATES, {}, {}, {}, {})
    return replace(manifest, files=tuple(files), pieces=tuple(pieces))


def rectangles(piece: StoredPiece) -> int:
    """The number of rectangles of rows and columns that a piece is: part of a row, whole rows, part of a row."""
    first, last = piece.columns or columns_of(SHAPES[piece.parameter])
    width = last - first
    begin, end = -(-piece.start // width), piece.stop // width
    if begin > end or len(SHAPES[piece.parameter]) == 1:
        return 1
    return (piece.start % width > 0) + (end > begin) + (piece.stop % width > 0)


def rows_of(source: Source) -> int:
    """The number of ranges without gaps that a source is."""
    return 1 if source.rows is None else -(-(source.rows.lead + source.count) // source.rows.width)


def bytes_read(sources: Sequence[Source], files: dict[str, StoredFile]) -> int:
    """The bytes of all chunks that hold some of the sources, and of the headers."""
    by_file = defaultdict(list)
    for source in sources:
        by_file[source.file].append(source)
    total = 0
    for name, found in by_file.items():
        ranges = byte_ranges(sorted(found, key=lambda source: source.offset), CHUNK_BYTES)
        total += sum(chunks.stop - chunks.start for chunks in chunk_ranges(ranges, CHUNK_BYTES, files[name].nbytes, CHUNKS_AT_ONCE))
        total += -(-files[name].header_bytes // CHUNK_BYTES) * CHUNK_BYTES
    return total


def timed(call: Callable[[], Result], rounds: int) -> tuple[Result, float]:
    """What the call returns, and the median of its seconds of a core."""
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        result = call()
        seconds.append(time.process_time() - started)
    return result, statistics.median(seconds)


@dataclass(frozen=True)
class Checkpoint:
    """The figures of a checkpoint. rectangles: as which its pieces would have to be written if they had whole rows only.

    read_mib: what a process that reads the manifest has had of memory at most, without what it has before.
    """

    saved: str
    manifest_bytes: int
    bytes_of_pieces: int
    pieces: int
    rectangles: int
    read_seconds: float
    read_mib: float
    index_seconds: float
    check_seconds: float


@dataclass(frozen=True)
class Load:
    """The figures of a rank that looks for all its elements. rows: ranges without gaps in all sources."""

    saved: str
    loaded: str
    rank: int
    stripes: int
    sources: int
    rows: int
    files: int
    sources_seconds: float
    chunks_seconds: float
    wanted_bytes: int
    read_bytes: int


def measured_checkpoint(world: World, rounds: int) -> tuple[Manifest, Checkpoint]:
    """The manifest as it is read from its file, and the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = manifest_of(world).to_json()
        (folder / MANIFEST_FILE).write_text(text)
        (folder / MARKER_FILE).write_text(marker_json(text))
        manifest, read_seconds = timed(lambda: read_manifest(folder), rounds)
        read_mib = int(subprocess.run([sys.executable, "-c", READ, name], check=True, capture_output=True, text=True).stdout) / 2**20
    index, index_seconds = timed(lambda: index_of(manifest), rounds)
    errors, check_seconds = timed(lambda: list(index.errors()), rounds)
    if errors:
        raise RuntimeError(f"the pieces of {world} are not the whole model: {errors[0]}")
    lines = len(text) - text.index('"pieces"')
    count = sum(map(rectangles, manifest.pieces))
    sizes = (len(text), lines, len(manifest.pieces), count)
    return manifest, Checkpoint(str(world), *sizes, read_seconds, read_mib, index_seconds, check_seconds)


READ = """
import sys
from pathlib import Path
from megatron_zpp.checkpoint.manifest import read_manifest
from megatron_zpp.monitor.memory import max_resident_bytes
before = max_resident_bytes(Path("/proc/self/status"))
read_manifest(Path(sys.argv[1]))
print(max_resident_bytes(Path("/proc/self/status")) - before)
"""


def index_of(manifest: Manifest) -> PieceIndex:
    return PieceIndex(manifest.pieces, manifest.shapes, manifest.states)


def measured_load(manifest: Manifest, saved: World, loaded: World, rank: int, rounds: int) -> Load:
    index = index_of(manifest)
    wanted = [(parameter, state, stripe) for parameter, state, stripe, _ in elements_of(loaded, rank)]
    sources, sources_seconds = timed(lambda: [source for one in wanted for source in index.sources(*one)], rounds)
    files = {file.name: file for file in manifest.files}
    read, chunks_seconds = timed(lambda: bytes_read(sources, files), rounds)
    wanted_bytes = sum(stripe.numel for _, _, stripe in wanted) * STATE_BYTES
    if sum(source.count for source in sources) * STATE_BYTES != wanted_bytes:
        raise RuntimeError("the sources are not what was wanted")
    rows, names = sum(map(rows_of, sources)), {source.file for source in sources}
    return Load(
        saved=str(saved),
        loaded=str(loaded),
        rank=rank,
        stripes=len(wanted),
        sources=len(sources),
        rows=rows,
        files=len(names),
        sources_seconds=sources_seconds,
        chunks_seconds=chunks_seconds,
        wanted_bytes=wanted_bytes,
        read_bytes=read,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reshard.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="a multiple of 8 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    if options.ranks < 8 or options.ranks % 8:
        parser.error(f"--ranks {options.ranks} is not a multiple of 8")
    checkpoints: list[Checkpoint] = []
    loads: list[Load] = []
    some_ranks = (0, options.ranks // 2, options.ranks - 1)
    for tensor_ranks, readers in CASES.items():
        saved = World(tensor_ranks, options.ranks)
        manifest, figures = measured_checkpoint(saved, options.rounds)
        checkpoints.append(figures)
        for loaded in (World(reader, options.ranks) for reader in readers):
            loads += [measured_load(manifest, saved, loaded, rank, options.rounds) for rank in some_ranks]
    members = {"checkpoints": [vars(one) for one in checkpoints], "loads": [vars(one) for one in loads]}
    report(
        "reshard", arguments, {"ranks": options.ranks}, f"{checkpoint_table(checkpoints)}\n\n{load_table(loads)}", members, options.output
    )
    return 0


def checkpoint_table(checkpoints: Sequence[Checkpoint]) -> str:
    lines = [
        "| saved as T x D | manifest, MB | pieces, MB | pieces | as rectangles | read, s | memory, MiB | index, s | check, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in checkpoints:
        sizes = f"{one.manifest_bytes / 1e6:.1f} | {one.bytes_of_pieces / 1e6:.1f} | {one.pieces} | {one.rectangles}"
        lines.append(
            f"| {one.saved} | {sizes} | {one.read_seconds:.2f} | {one.read_mib:.0f} | {one.index_seconds:.3f} | {one.check_seconds:.3f} |"
        )
    return "\n".join(lines)


def load_table(loads: Sequence[Load]) -> str:
    """Each figure is that of the worst rank."""
    lines = [
        "| saved | loaded | sources | rows | files | sources, s | chunks, s | GB wanted | GB read | read / wanted |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for saved, loaded in dict.fromkeys((one.saved, one.loaded) for one in loads):
        ranks = [one for one in loads if (one.saved, one.loaded) == (saved, loaded)]
        found = " | ".join(str(max(counts)) for counts in zip(*((one.sources, one.rows, one.files) for one in ranks), strict=True))
        seconds = f"{max(one.sources_seconds for one in ranks):.3f} | {max(one.chunks_seconds for one in ranks):.3f}"
        nbytes = f"{max(one.wanted_bytes for one in ranks) / 1e9:.2f} | {max(one.read_bytes for one in ranks) / 1e9:.2f}"
        lines.append(
            f"| {saved} | {loaded} | {found} | {seconds} | {nbytes} | {max(one.read_bytes / one.wanted_bytes for one in ranks):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
