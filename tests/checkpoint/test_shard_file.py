"""One safetensors file and its checksums."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatron_zpp.checkpoint import shard_file
from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from megatron_zpp.checkpoint.shard_file import DTYPES, TensorEntry, lay_out, write_file
from megatron_zpp.checkpoint.verified_file import VerifiedFile

CHUNK_BYTES = 64
TYPE_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def tensors_of(sizes: list[int], types: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return {f"tensor {index}": torch.randn(size, generator=generator).to(DTYPES[types]) for index, size in enumerate(sizes)}


def write(path: Path, tensors: dict[str, torch.Tensor], chunk_bytes: int = CHUNK_BYTES):
    entries = [TensorEntry(name, TYPE_OF_DTYPE[values.dtype], tuple(values.shape)) for name, values in tensors.items()]
    layout = lay_out(entries)
    return write_file(path, layout, tensors.values(), chunk_bytes), layout


@settings(max_examples=30)
@given(st.lists(st.integers(0, 100), max_size=6), st.sampled_from(sorted(DTYPES)), st.sampled_from([4, 64, 1000, 1 << 20]))
def test_safetensors_reads_the_file_and_the_checksums_are_those_of_its_chunks(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], types: str, chunk_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("shard") / "rank_00000.safetensors"
    tensors = tensors_of(sizes, types)
    stored, layout = write(path, tensors, chunk_bytes)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(name), values) for name, values in tensors.items())
    data = path.read_bytes()
    assert stored.nbytes == len(data) == layout.nbytes
    assert list(stored.checksums) == [zlib.crc32(data[start : start + chunk_bytes]) for start in range(0, len(data), chunk_bytes)]
    for (name, values), offset in zip(tensors.items(), layout.offsets, strict=True):
        assert data[offset : offset + values.nbytes] == values.view(torch.uint8).numpy().tobytes(), name


def test_a_matrix_keeps_its_shape_and_a_strided_tensor_its_values(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4).t()
    write(tmp_path / "f", {"m": matrix})
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert torch.equal(file.get_tensor("m"), matrix)


def test_what_is_read_is_verified_and_counted(tmp_path: Path) -> None:
    stored, _ = write(tmp_path / "f", tensors_of([300], "F32"))
    file = VerifiedFile(tmp_path, stored, CHUNK_BYTES)
    header_bytes = -(-stored.header_bytes // CHUNK_BYTES) * CHUNK_BYTES
    assert file.bytes_read == header_bytes
    whole = (tmp_path / "f").read_bytes()
    assert file.read(640, 704) == whole[640:704]
    assert file.bytes_read == header_bytes + 64
    with (tmp_path / "f").open("r+b") as damaged:
        damaged.seek(650)
        damaged.write(bytes([whole[650] ^ 1]))
    with pytest.raises(DamagedCheckpointError, match="f is damaged: bytes 640 to 704 do not have the checksum"):
        file.read(640, 704)
    assert file.read(704, 832) == whole[704:832]
    file.close()


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"\x81" + data[1:]])
def test_a_file_of_another_length_or_header_is_refused_when_it_is_opened(tmp_path: Path, change) -> None:
    stored, _ = write(tmp_path / "f", tensors_of([300], "F32"))
    (tmp_path / "f").write_bytes(change((tmp_path / "f").read_bytes()))
    with pytest.raises(DamagedCheckpointError, match=str(tmp_path / "f")):
        VerifiedFile(tmp_path, stored, CHUNK_BYTES)


def test_a_full_disk_is_said_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="/dev/full/f cannot be written"):
        write(Path("/dev/full/f"), tensors_of([3], "F32"))


def test_a_failure_of_the_disk_in_mid_file_is_told_though_the_system_tells_of_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fail_once(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail_once)
    monkeypatch.setattr(shard_file, "FLUSH_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"f cannot be written \(Input/output error\)"):
        write(tmp_path / "f", tensors_of([300] * 9, "F32"))


def test_a_file_is_brought_to_the_disk_while_it_is_written_and_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(shard_file, "FLUSH_BYTES", 1000)
    stored, _ = write(tmp_path / "f", tensors_of([300] * 9, "F32"))
    assert len(sizes) > 1 and sizes[0] < sizes[-1] == stored.nbytes


def test_tensors_that_are_not_those_of_the_layout_are_a_broken_invariant(tmp_path: Path) -> None:
    layout = lay_out([TensorEntry("t", "F32", (3,))])
    with pytest.raises(RuntimeError, match="bytes were written, its header says"):
        write_file(tmp_path / "f", layout, [torch.zeros(4)], CHUNK_BYTES)
