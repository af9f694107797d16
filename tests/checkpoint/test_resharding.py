"""What some tensor and data ranks have saved is read by any others, element for element."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.divided_state import CHUNK_BYTES, SHAPES, World, part_of, pieces_of_rank, save, whole_state
from harness.source_places import places_of
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, MARKER_FILE, DamagedCheckpointError, StoredPiece, marker_json
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.reshard import PieceIndex
from megatron_zpp.checkpoint.verified_file import VerifiedFile
from megatron_zpp.parallel.division import Division, HeldRange, Stripe
from megatron_zpp.parallel.stripes import columns_of
from megatron_zpp.zero.pieces import Piece, pieces_of

STATES = {"weight": "F32", "exp_avg": "BF16"}
WORLDS = [World(1, 1), World(1, 3), World(2, 2), World(4, 1), World(4, 3)]


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    folder = tmp_path_factory.mktemp("saved") / "iter_0000001"
    save(folder, whole_state(STATES), STATES, request.param)
    return request.param, folder


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_rank_reads_its_elements_bit_for_bit(saved: tuple[World, Path], world: World) -> None:
    with CheckpointReader(saved[1]) as reader:
        for rank in world.ranks:
            expected = list(pieces_of_rank(whole_state(STATES), world, rank, only_counted=False))
            found = [Piece(one.parameter, one.state, one.start, one.stop, torch.zeros_like(one.values), one.columns) for one in expected]
            reader.fill(found)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.values, other.values), (rank, other)


def test_columns_that_alternate_in_the_rows_of_a_file_are_filled_at_once(saved: tuple[World, Path]) -> None:
    world = World(4, 1)
    expected = [piece for rank in world.ranks for piece in pieces_of_rank(whole_state(STATES), world, rank, only_counted=False)]
    found = [Piece(one.parameter, one.state, one.start, one.stop, torch.zeros_like(one.values), one.columns) for one in expected]
    with CheckpointReader(saved[1]) as reader:
        reader.fill(found)
        most_bytes = sum(file.nbytes + -(-file.header_bytes // CHUNK_BYTES) * CHUNK_BYTES for file in reader.manifest.files)
        assert reader.bytes_read <= most_bytes
    assert all(torch.equal(one.values, other.values) for one, other in zip(found, expected, strict=True))


def test_whole_parameters_are_read_as_a_whole_and_in_parts(saved: tuple[World, Path]) -> None:
    with CheckpointReader(saved[1]) as reader:
        assert list(reader.verify()) == []
        for (name, state), values in whole_state(STATES).items():
            assert torch.equal(reader.read(name, state, 0, values.numel()), values.view(-1))
            if state == "weight":
                assert torch.equal(reader.weight(name), values)
                assert torch.equal(torch.cat(list(reader.weight_in_parts(name, 11))), values.view(-1))


def test_the_program_in_the_documentation_reads_every_parameter(saved: tuple[World, Path]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program.replace("DIR/iter_0000100", str(saved[1])), names)
    for (name, state), values in whole_state(STATES).items():
        if STATES[state] == "F32":
            assert torch.equal(torch.from_numpy(names["read"](name, state)), values)


@pytest.mark.parametrize("chunks_at_once", [1, 3])
def test_no_chunk_is_read_twice_and_none_without_need(
    saved: tuple[World, Path], chunks_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows are longer than chunks here, others shorter."""
    chunks: Counter[tuple[Path, int]] = Counter()

    def count(file: VerifiedFile, view: memoryview, start: int) -> None:
        chunks.update((file.path, place) for place in range(start, start + len(view), CHUNK_BYTES))
        read_into(file, view, start)

    read_into = VerifiedFile._read_into
    monkeypatch.setattr(VerifiedFile, "_read_into", count)
    monkeypatch.setattr("megatron_zpp.checkpoint.reader.CHUNKS_AT_ONCE", chunks_at_once)
    for rank in World(4, 3).ranks:
        chunks.clear()
        pieces = list(pieces_of_rank(whole_state(STATES), World(4, 3), rank, only_counted=False))
        with CheckpointReader(saved[1]) as reader:
            reader.fill(pieces)
            header_chunks = {file.name: -(-file.header_bytes // CHUNK_BYTES) for file in reader.manifest.files}
            needed = _chunks_with_elements(reader, pieces)
        del pieces
        read = Counter({(path.name, place): count for (path, place), count in chunks.items()})
        headers = {(name, chunk * CHUNK_BYTES) for name, count in header_chunks.items() for chunk in range(count)}
        assert all(count == 1 or key in headers for key, count in read.items())
        assert set(read) - headers == needed - headers


def _chunks_with_elements(reader: CheckpointReader, pieces: list[Piece]) -> set[tuple[str, int]]:
    """The chunks with an element of the pieces, found element by element."""
    index = PieceIndex(reader.manifest.pieces, reader.manifest.shapes, reader.manifest.states)
    return {
        (source.file, byte // CHUNK_BYTES * CHUNK_BYTES)
        for piece in pieces
        for source in index.sources(
            piece.parameter, piece.state, Stripe(piece.columns or columns_of(SHAPES[piece.parameter]), piece.start, piece.stop)
        )
        for byte, _ in places_of(source)
    }


def test_a_checkpoint_of_one_tensor_rank_names_no_columns(tmp_path: Path) -> None:
    save(tmp_path / "1", whole_state(STATES), STATES, World(1, 3))
    assert "columns" not in (tmp_path / "1" / MANIFEST_FILE).read_text()
    save(tmp_path / "2", whole_state(STATES), STATES, World(2, 1))
    pieces = json.loads((tmp_path / "2" / MANIFEST_FILE).read_text())["pieces"]
    assert {tuple(piece["columns"]) for piece in pieces if piece["parameter"] == "down"} == {(0, 40), (40, 80)}
    assert not any("columns" in piece for piece in pieces if piece["parameter"] not in ("down", "projection"))


@pytest.mark.parametrize(
    ("is_lost", "words"),
    [
        (True, "elements 0 to 120 of columns 40 to 80 of down (weight) are in none of its files"),
        (False, "elements 0 to 120 of columns 40 to 80 of down (weight) are in its files twice"),
    ],
)
def test_stripes_that_are_missing_or_doubled_are_found_by_verify_and_not_loaded(tmp_path: Path, is_lost: bool, words: str) -> None:
    folder = tmp_path / "iter_0000001"
    save(folder, whole_state(STATES), STATES, World(2, 1))
    members = json.loads((folder / MANIFEST_FILE).read_text())
    (chosen,) = (piece for piece in members["pieces"] if piece["parameter"] == "down" and piece["columns"] == [40, 80])
    if is_lost:
        members["pieces"].remove(chosen)
    else:
        members["pieces"].append(chosen)
    text = json.dumps(members)
    (folder / MANIFEST_FILE).write_text(text)
    (folder / MARKER_FILE).write_text(marker_json(text))
    with CheckpointReader(folder) as reader:
        assert [words in finding for finding in reader.verify()] == [True, False]  # the second is that of exp_avg
        with pytest.raises(DamagedCheckpointError, match="is incomplete or contradicts itself"):
            reader.weight("words")


def test_a_byte_flipped_in_a_row_between_wanted_columns_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000001"
    save(folder, whole_state(STATES), STATES, World(1, 1), chunk_bytes=1 << 20)
    path = folder / "rank_00000.safetensors"
    with CheckpointReader(folder) as reader:
        (piece,) = (piece for piece in reader.manifest.pieces if piece.parameter == "down")
    data = bytearray(path.read_bytes())
    data[piece.offsets["weight"] + 4 * 85] ^= 1  # row 1, column 5
    path.write_bytes(data)
    wanted = Piece("down", "weight", 0, 6, torch.zeros(6), (0, 2))
    with CheckpointReader(folder) as reader, pytest.raises(DamagedCheckpointError, match=f"{path} is damaged"):
        reader.fill([wanted])


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Division]:
    """All parts of one division: by rows with any holders, or by columns of any width."""
    ranks = draw(st.integers(1, 4))
    dim = draw(st.integers(0, len(shape) - 1))
    if dim == 1:
        ends = [0, *sorted(draw(st.sets(st.integers(1, shape[1] - 1), max_size=min(ranks, shape[1]) - 1))), shape[1]]
        runs = tuple(HeldRange(start, stop, (rank,)) for rank, (start, stop) in enumerate(itertools.pairwise(ends)))
        return [Division(shape, 1, runs, rank) for rank in range(len(runs))]
    ends = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0] - 1), max_size=6))})
    holders = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    runs = tuple(HeldRange(start, stop, draw(holders)) for start, stop in itertools.pairwise(ends))
    return [Division(shape, 0, runs, rank) for rank in range(ranks) if any(rank in run.holders for run in runs)]


@given(st.data())
def test_any_division_is_read_as_any_other_division(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(1,), (12,), (6, 7), (9, 2), (1, 8)]))
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    stored, memory = [], torch.zeros(0)
    for division in data.draw(divisions(shape)):
        for piece in _counted(whole, division, data.draw(st.integers(1, 4))):
            offsets = {"weight": 4 * memory.numel()}
            stored.append(StoredPiece(piece.parameter, piece.start, piece.stop, "file", offsets, piece.columns))
            memory = torch.cat([memory, piece.values])
    index = PieceIndex(stored, {"p": shape}, {"weight": "F32"})
    assert list(index.errors()) == [] and memory.numel() == whole.numel()
    for division in data.draw(divisions(shape)):
        part = part_of(whole, division)
        start = data.draw(st.integers(0, part.numel()))
        stop = data.draw(st.integers(start, part.numel()))
        found = torch.full_like(part, -1)
        for placed in division.stripes(start, stop):
            for source in index.sources("p", "weight", placed.stripe):
                for byte, place in places_of(source):
                    found[placed.offset + place] = memory[byte // 4]
        assert torch.equal(found[start:stop], part[start:stop])


def _counted(whole: torch.Tensor, division: Division, data_ranks: int) -> list[Piece]:
    """What the data ranks of a tensor rank save of its part."""
    part = part_of(whole, division)
    is_counted = torch.ones(part.numel(), dtype=torch.bool)
    for shared in division.shared():
        is_counted[shared.start : shared.stop] = shared.counted
    ends = {part.numel() * rank // data_ranks for rank in range(data_ranks + 1)}
    ends |= {place for shared in division.shared() for place in (shared.start, shared.stop)}
    return [
        piece
        for start, stop in itertools.pairwise(sorted(ends))
        if is_counted[start]
        for piece in pieces_of("p", "weight", division, start, part[start:stop])
    ]
