"""Reads JSON lines as batches of complete lines, from plain, gzip or zstd files, named by path, glob or folder, or from standard input."""

import glob
import gzip
import io
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn

from megatron_zpp.config.counted import counted
from megatron_zpp.data.preprocess.other_formats import HEAD_BYTES, refuse_other_format
from megatron_zpp.system.outside import open_regular
from megatron_zpp.system.user_error import UserError

STANDARD_INPUT = "-"
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
BATCH_BYTES = 1 << 18
# The window of zstd's --ultra --long=31; each file says itself how much it needs.
LARGEST_WINDOW_BYTES = 1 << 31
COMPRESSED_PIECE_BYTES = 1 << 10  # of zstd: 32 MiB of text at most, because 4 bytes can be a block of 128 KiB of one byte
GZIP_MAGIC = b"\x1f\x8b"
# A zstd file begins with a frame of text or, if pzstd wrote it, with a skippable frame (RFC 8878, 3.1).
ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes((low,)) + b"\x2a\x4d\x18" for low in range(0x50, 0x60)))
MAGIC_BYTES = 4
# A line is in memory as a whole, and several times while it is tokenised. A small compressed file can hold one of any length.
LONGEST_LINE_BYTES = 512_000_000


class Position(NamedTuple):
    """A place between two lines of input number `source`: `line` lines with `offset` bytes of text lie before it."""

    source: int = 0
    offset: int = 0
    line: int = 0


class LineBatch(NamedTuple):
    """Complete lines of one file."""

    source: int  # index of the file among the inputs
    offset: int  # bytes of text before the first line
    text: bytes  # with line ends; the last line of a file may have none
    file_bytes: int  # read from the file so far; compressed bytes if it is compressed


class DamagedInput(UserError):
    """A file cannot be read to its end. source: its index among the inputs."""

    def __init__(self, path: str, source: int, error: Exception) -> None:
        super().__init__(f"{path} is damaged or cut off ({error}); copy it again.")
        self.source = source


def find_inputs(words: Sequence[str], print_line: Callable[[str], None]) -> list[str]:
    """The files that the words of --input name, in order of the words. Files of a folder (and its subfolders) or a glob are sorted by name.

    print_line: called if files in a folder are left out.
    Raises UserError for a word without a file, for a file that is named twice, even under two names, and for one of another format.
    """
    paths = [path for word in words for path in _files_of(word, print_line)]
    named: dict[str, str] = {}
    for path in paths:
        real = path if path == STANDARD_INPUT else os.path.realpath(path)
        if real in named:
            spelled = "" if named[real] == path else f" (as {named[real]} before)"
            raise UserError(f"--input names {path} twice{spelled}; name it once, its documents would be written twice.")
        named[real] = path
    for path in paths:
        if path != STANDARD_INPUT:
            _refuse_other_formats(path)
    return paths


def line_batches(paths: Sequence[str], start: Position, longest_line_bytes: int = LONGEST_LINE_BYTES) -> Iterator[LineBatch]:
    """All lines of the files from a position on, about BATCH_BYTES at a time.

    longest_line_bytes: as --max-line-megabytes says. Raises DamagedInput for a damaged file, UserError for a longer line.
    """
    for source in range(start.source, len(paths)):
        offset = start.offset if source == start.source else 0
        try:
            with Source(paths[source]) as file:
                yield from _batches_of(file, source, offset, longest_line_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DamagedInput(paths[source], source, error) from None


def count_text_bytes(paths: Sequence[str]) -> int:
    """Number of bytes of text in the files. Compressed files are read for it."""
    return sum(_text_bytes(path) for path in paths)


class Source:
    """One file, or standard input for "-", as text, decompressed if its first bytes say so. file_bytes: read from it so far."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._reads_stdin = path == STANDARD_INPUT
        descriptor = sys.stdin.fileno() if self._reads_stdin else open_regular(path)
        os.set_blocking(descriptor, True)  # otherwise a pause of what writes standard input would look like its end
        self._file = io.BufferedReader(_RawFile(descriptor, closefd=not self._reads_stdin))
        self._read_bytes = 0
        self._head = self._file.peek(MAGIC_BYTES)
        if not self.is_compressed and path.endswith((".gz", ".zst")):
            raise UserError(f"{path} is not compressed, although its name says so; rename it, or copy it again.")

    @property
    def is_compressed(self) -> bool:
        return self._head.startswith((GZIP_MAGIC, *ZSTD_MAGICS))

    @property
    def file_bytes(self) -> int:
        return self._read_bytes if self._reads_stdin else self._file.tell()

    def blocks(self, offset: int) -> Iterator[bytes]:
        """The text from offset on, in blocks of about BATCH_BYTES. Raises UserError if it begins like another format than JSON lines."""
        blocks = self._blocks(offset)
        if offset == 0:
            first = next(blocks, b"")
            refuse_other_format(self.path, first[:HEAD_BYTES], is_compressed=self.is_compressed)
            if first:
                yield first
        yield from blocks

    def _blocks(self, offset: int) -> Iterator[bytes]:
        if self._head.startswith(GZIP_MAGIC):
            yield from _skip_bytes(offset, _gzip_blocks(self._file))
        elif self._head.startswith(ZSTD_MAGICS):
            yield from _skip_bytes(offset, _in_batches(_zstd_blocks(self._file)))
        else:
            if offset:
                self._file.seek(offset)
            yield from self._plain_blocks()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _plain_blocks(self) -> Iterator[bytes]:
        while block := self._file.read(BATCH_BYTES):
            self._read_bytes += len(block)
            yield block


class _RawFile(io.FileIO):
    """A file, or a pipe, of which each read returns MAGIC_BYTES or more before the end, however little was written to it at once."""

    def readinto(self, buffer: Any) -> int:
        view, filled = memoryview(buffer), 0
        while filled < MAGIC_BYTES and (count := super().readinto(view[filled:])):
            filled += count
        return filled


def _files_of(word: str, print_line: Callable[[str], None]) -> list[str]:
    if word == STANDARD_INPUT and sys.stdin is None:
        raise UserError("--input - reads standard input, which is closed; pipe JSON lines into the tool, or give files.")
    if word == STANDARD_INPUT or os.path.isfile(word):
        return [word]
    if os.path.isdir(word):
        below = _files_below(word)
        found = [path for path in below if path.endswith(ENDINGS)]
        if not found:
            raise UserError(f"--input {word} is a folder without files that end in {', '.join(ENDINGS)}; give files, or a glob.")
        if len(found) < len(below):
            others = counted(len(below) - len(found), "file with another ending is", "files with other endings are")
            print_line(f"--input {word}: {others} not read.")
        return found
    found = sorted(path for path in glob.glob(word, recursive=True) if os.path.isfile(path))
    if not found:
        raise UserError(f"--input {word} is not a file, a folder or a glob that matches one; give JSON lines, or - for standard input.")
    return found


def _refuse_other_formats(path: str) -> None:
    with Source(path) as file:
        try:
            next(file.blocks(0), b"")
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return  # whoever reads the file says that it is damaged, and where


def _files_below(folder: str) -> list[str]:
    """All files in the folder and its subfolders, sorted by name. Links to folders are followed, but no folder is entered twice."""
    entered: set[tuple[int, int]] = set()
    found: list[str] = []
    for place, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders.sort()  # if a folder has two names, the first one counts
        found += [path for name in names if os.path.isfile(path := os.path.join(place, name))]
    return sorted(found)


def _refuse(error: OSError) -> NoReturn:
    raise error


def _text_bytes(path: str) -> int:
    with Source(path) as file:
        return sum(map(len, file.blocks(0))) if file.is_compressed else os.path.getsize(path)


def _batches_of(file: Source, source: int, offset: int, longest_line_bytes: int) -> Iterator[LineBatch]:
    parts: list[bytes] = []
    begun_bytes = 0  # of the line that has not ended yet
    for block in file.blocks(offset):
        end = block.rfind(b"\n") + 1
        if end:
            text = b"".join([*parts, block[:end]])
            yield LineBatch(source, offset, text, file.file_bytes)
            offset += len(text)
            parts, begun_bytes = [], 0
        if end < len(block):
            parts.append(block[end:])
            begun_bytes += len(block) - end
        if begun_bytes > longest_line_bytes:
            raise UserError(
                f"{file.path} has a line of more than {longest_line_bytes} bytes after byte {offset} of its text; put a line end after "
                "each document, give a larger --max-line-megabytes, or leave the file out."
            )
    if parts:
        yield LineBatch(source, offset, b"".join(parts), file.file_bytes)


def _gzip_blocks(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as text:
        while block := text.read(BATCH_BYTES):
            yield block


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """The text, frame by frame. (The package's own reader does not notice that a file is cut off.)"""
    try:
        import zstandard
    except ImportError:
        raise UserError("a file compressed by zstd needs package zstandard, which is not installed; run: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES)
    frame, rest = decompressor.decompressobj(), b""
    is_inside = False
    try:
        while rest or (rest := file.read(COMPRESSED_PIECE_BYTES)):
            if block := frame.decompress(rest):
                yield block
            is_inside, rest = not frame.eof, frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = decompressor.decompressobj()
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from None
    if is_inside:
        raise EOFError("its last frame does not end")


def _in_batches(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks of BATCH_BYTES or more; only the last one may be smaller."""
    parts: list[bytes] = []
    nbytes = 0
    for block in blocks:
        parts.append(block)
        nbytes += len(block)
        if nbytes >= BATCH_BYTES:
            yield b"".join(parts)
            parts, nbytes = [], 0
    if parts:
        yield b"".join(parts)


def _skip_bytes(offset: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks without their first offset bytes."""
    for block in blocks:
        if offset < len(block):
            yield block[offset:]
        offset = max(0, offset - len(block))
