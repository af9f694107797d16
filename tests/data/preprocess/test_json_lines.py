import gzip
import struct
from pathlib import Path

import pytest
import zstandard

from megatron_zpp.data.preprocess import json_lines
from megatron_zpp.data.preprocess.json_lines import Position, Source, find_inputs, line_batches


def found(folder: Path, *words: object) -> tuple[list[str], list[str]]:
    """The inputs relative to the folder, and the printed lines."""
    said: list[str] = []
    paths = find_inputs([str(word) for word in words], said.append)
    return [str(Path(path).relative_to(folder)) for path in paths], said


def test_links_in_a_folder_are_followed_and_a_circle_ends(tmp_path: Path) -> None:
    for name in ("elsewhere/deep/c.jsonl", "in/sub/b.jsonl", "in/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "in" / "sub" / "circle").symlink_to(tmp_path / "in", target_is_directory=True)
    assert found(tmp_path, tmp_path / "in") == (["in/a.jsonl", "in/link/deep/c.jsonl", "in/sub/b.jsonl"], [])


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.txt", "c.jsonl.bz2"):
        (tmp_path / name).touch()
    assert found(tmp_path, tmp_path) == (["a.jsonl"], [f"--input {tmp_path}: 2 files with other endings are not read."])


def test_a_file_named_twice_is_refused_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    Path("b.jsonl").symlink_to("a.jsonl")
    for again in ("./a.jsonl", str(tmp_path / "a.jsonl"), "b.jsonl"):
        with pytest.raises(ValueError, match=rf"--input names {again} twice \(as a.jsonl before\); name it once"):
            find_inputs(["a.jsonl", again], print)
    with pytest.raises(ValueError, match=r"--input names a.jsonl twice; name it once"):
        find_inputs(["a.jsonl", "a.jsonl"], print)
    with pytest.raises(ValueError, match=r"--input names - twice; name it once"):
        find_inputs(["-", "-"], print)


@pytest.mark.parametrize("magic", [0x184D2A50, 0x184D2A5F])
def test_zstd_that_begins_with_a_frame_to_skip_is_read(tmp_path: Path, magic: int) -> None:
    lines = [b'{"text": "1"}\n', b'{"text": "2"}\n']
    # As pzstd writes it: before each frame a skippable frame with the size of the next one.
    frames = [zstandard.ZstdCompressor().compress(line) for line in lines]
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(b"".join(struct.pack("<III", magic, 4, len(frame)) + frame for frame in frames))
    assert b"".join(batch.text for batch in line_batches([str(path)], Position())) == b"".join(lines)
    with Source(str(path)) as source:
        assert source.is_compressed


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_line_that_is_too_long_for_memory_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compressed: bool
) -> None:
    monkeypatch.setattr(json_lines, "LONGEST_LINE_BYTES", 1 << 20)
    text = b"short\n" + b"x" * (4 << 20)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(gzip.compress(text) if is_compressed else text)
    with pytest.raises(ValueError, match=f"{path} has a line of more than 1048576 bytes behind byte 6 of its text; put a line end"):
        list(line_batches([str(path)], Position()))
    path.write_bytes(b"".join(b"x" * 800_000 + b"\n" for _ in range(4)))
    assert sum(len(batch.text) for batch in line_batches([str(path)], Position())) == 4 * 800_001
