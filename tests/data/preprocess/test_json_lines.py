import bz2
import gzip
import io
import json
import lzma
import os
import re
import struct
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron_zpp.data.preprocess import json_lines
from megatron_zpp.data.preprocess.document_encoder import read_texts
from megatron_zpp.data.preprocess.json_lines import Position, Source, find_inputs, line_batches
from megatron_zpp.system.user_error import UserError


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
        with pytest.raises(UserError, match=rf"--input names {again} twice \(as a.jsonl before\); name it once"):
            find_inputs(["a.jsonl", again], print)
    with pytest.raises(UserError, match=r"--input names a.jsonl twice; name it once"):
        find_inputs(["a.jsonl", "a.jsonl"], print)
    with pytest.raises(UserError, match=r"--input names - twice; name it once"):
        find_inputs(["-", "-"], print)


def test_standard_input_that_is_closed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match=r"--input - reads standard input, which is closed; pipe JSON lines"):
        find_inputs(["-"], print)


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_an_empty_file_is_no_compressed_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"{name} is not compressed, although its name says so; rename it, or copy it again"):
        list(line_batches([str(tmp_path / name)], Position()))


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


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_standard_input_is_decompressed_even_if_its_first_write_is_short(
    compress: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe2(os.O_DIRECT)  # a read returns what one write brought
    content = compress(b"a\nb\n")
    for start, stop in ((0, 1), (1, 3), (3, len(content))):
        os.write(writing, content[start:stop])
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert b"".join(batch.text for batch in line_batches(["-"], Position())) == b"a\nb\n"


def test_a_pause_on_standard_input_that_does_not_block_is_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading) as stdin, os.fdopen(writing, "wb", 0) as pipe:
        monkeypatch.setattr(sys, "stdin", stdin)
        pipe.write(b"a\nb\n")
        with Source("-"):
            assert os.get_blocking(reading)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_a_line_that_is_too_long_for_memory_is_refused_with_its_place(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(compress(b"short\n" + b"x" * (4 << 20)))
    with pytest.raises(UserError, match=f"{path} has a line of more than 1000000 bytes after byte 6 of its text; .* --max-line-megabytes"):
        list(line_batches([str(path)], Position(), 1_000_000))
    path.write_bytes(compress(b"".join(b"x" * 800_000 + b"\n" for _ in range(4))))
    assert sum(len(batch.text) for batch in line_batches([str(path)], Position(), 1_000_000)) == 4 * 800_001


def zeros_in_zstd(nbytes: int) -> bytes:
    """A frame of this many zeros, in blocks of 128 KiB that take 4 bytes each (RFC 8878, 3.1.1.2: run-length encoded)."""
    blocks = nbytes >> 17
    header = struct.pack("<IBB", 0xFD2FB528, 0, (17 - 10) << 3)  # no checksum, no size of the content, a window of 2^17 bytes
    return header + b"".join(struct.pack("<I", (1 << 17) << 3 | 1 << 1 | (block == blocks - 1)) for block in range(blocks))[: 4 * blocks]


def test_zstd_that_expands_enormously_takes_little_memory_before_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(zeros_in_zstd(2 << 30))
    assert path.stat().st_size < 70_000
    tracemalloc.start()
    with pytest.raises(UserError, match="bomb.jsonl.zst has a line of more than 50000000 bytes"):
        list(line_batches([str(path)], Position(), 50_000_000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 200 << 20


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_text_in_many_zstd_frames_comes_in_batches(tmp_path: Path, size: int) -> None:
    text = b"".join(b'{"text": "%d"}\n' % number for number in range(40_000))
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(b"".join(zstandard.compress(text[start : start + size]) for start in range(0, min(len(text), 1000 * size), size)))
    batches = list(line_batches([str(path)], Position()))
    assert b"".join(batch.text for batch in batches) == text[: 1000 * size]
    assert len(batches) <= 1 + len(text) // json_lines.BATCH_BYTES


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'\xef\xbb\xbf{"text": "a"}', "begins with a byte order mark, which JSON does not have; save the file as UTF-8 without it"),
        (b"\xff\xfe{\x00", "not valid UTF-8 at byte 0 of the line"),
        (b"", "not JSON .*; every line needs one object, such as .*"),
        (b"[]", "holds list, but a JSON object is needed"),
        (b'{"text": "a", "id": %s}' % (b"9" * 5000), "holds a whole number of more than 4300 digits; write it as a string"),
    ],
)
def test_a_line_that_is_no_document_says_what_it_is(line: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=f"^{reason}$"):
        read_texts(line, ["text"])
    assert read_texts(b'{"text": "a"}\r\n', ["text"]) == {"text": "a"}


LINES = b'{"text": "a"}\n{"text": "b"}\n'
ARRAY = json.dumps([{"text": "a"}, {"text": "b"}])


def packed(pack: Callable[[Path, bytes], object], folder: Path) -> Path:
    path = folder / "some data"
    pack(path, LINES)
    return path


def zip_up(path: Path, lines: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", lines)


def tar_up(path: Path, lines: bytes) -> None:
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(lines)
        archive.addfile(member, io.BytesIO(lines))


@pytest.mark.parametrize(
    ("pack", "what", "remedy"),
    [
        (lambda path, lines: path.write_bytes(b"PAR1" + lines), "a Parquet file", "python -c .*read_parquet.* {}"),
        (lambda path, lines: path.write_bytes(b"ARROW1\0\0"), "an Arrow file", "python -c .*read_feather.* {}"),
        (lambda path, lines: path.write_bytes(b"\xff\xff\xff\xff\x40\0"), "an Arrow stream", "python -c .*open_stream.* {}"),
        (lambda path, lines: path.write_bytes(lzma.compress(lines)), "compressed by xz", "xz -dc {} > {}.jsonl"),
        (
            lambda path, lines: path.write_bytes(lzma.compress(lines, lzma.FORMAT_ALONE)),
            "compressed by lzma",
            "xz --format=lzma -dc {} > {}.jsonl",
        ),
        (lambda path, lines: path.write_bytes(bz2.compress(lines)), "compressed by bzip2", "bzip2 -dc {} > {}.jsonl"),
        (zip_up, "a zip archive", "unzip {}"),
        (tar_up, "a tar archive", "tar -xf {}"),
        (lambda path, lines: path.write_text(lines.decode(), "utf-16"), "text in UTF-16", "iconv -f UTF-16 -t UTF-8 {} > {}.utf8.jsonl"),
        (lambda path, lines: path.write_text(lines.decode(), "utf-16-be"), "text in UTF-16", "iconv -f UTF-16BE .*"),
        (lambda path, lines: path.write_text(lines.decode(), "utf-32"), "text in UTF-32", "iconv -f UTF-32 .*"),
        (lambda path, lines: path.write_text(ARRAY), "one JSON array", "jq -c '.\\[\\]' {} > {}.jsonl"),
        (lambda path, lines: path.write_text(f"\n[\n{ARRAY[1:]}"), "one JSON array", "jq .*"),
        (lambda path, lines: path.write_text('{\n "text": "a"\n}\n'), "JSON with objects over several lines", "jq -c . {} > {}.jsonl"),
    ],
)
def test_a_file_of_another_format_is_refused_at_the_start_with_what_makes_json_lines_of_it(
    pack: Callable[[Path, bytes], object], what: str, remedy: str, tmp_path: Path
) -> None:
    path = packed(pack, tmp_path)
    command = remedy.replace("{}", f"'{path}'")
    match = f"^{path} is {re.escape(what)}, but JSON lines are needed; this makes them: {command}$"
    with pytest.raises(UserError, match=match):
        find_inputs([str(path)], print)
    with pytest.raises(UserError, match=match):
        list(line_batches([str(path)], Position()))


def test_another_format_inside_a_compressed_file_is_refused_and_a_bad_line_is_no_format(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(ARRAY.encode()))
    match = f"^{path} holds, compressed, what is one JSON array, but .*; decompress it; then this makes them: jq .* {tmp_path}/a.json > .*"
    with pytest.raises(UserError, match=match):
        find_inputs([str(path)], print)
    for first in (b"[]", b'["a"]', b"", b"{}", b'{"text": "a"}'):
        path.write_bytes(gzip.compress(first + b"\n" + LINES))
        assert find_inputs([str(path)], print) == [str(path)]
