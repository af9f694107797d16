"""Recognizes files that are not JSON lines by their first bytes, and says what makes JSON lines of them.

Line by line they would only be bad lines, and --skip-invalid would leave a whole file out.
"""

import os
import re
import shlex
from typing import NamedTuple

HEAD_BYTES = 512  # the first record of a tar archive
_TAR_MAGIC = slice(257, 262)


class _Format(NamedTuple):
    """begins: what a file of this format begins with. what: in words. remedy: a shell command with {} for the file."""

    begins: bytes
    what: str
    remedy: str


_BY_PANDAS = (
    'python -c \'import sys, pandas, pyarrow.ipc; {}.to_json(sys.argv[1] + ".jsonl", orient="records", lines=True, force_ascii=False)\' '
)
_FORMATS = (
    _Format(b"PAR1", "a Parquet file", _BY_PANDAS.format("pandas.read_parquet(sys.argv[1])") + "{}"),
    _Format(b"ARROW1", "an Arrow file", _BY_PANDAS.format("pandas.read_feather(sys.argv[1])") + "{}"),
    _Format(b"\xff\xff\xff\xff", "an Arrow stream", _BY_PANDAS.format("pyarrow.ipc.open_stream(sys.argv[1]).read_pandas()") + "{}"),
    _Format(b"\xfd7zXZ\x00", "compressed by xz", "xz -dc {} > {}.jsonl"),
    _Format(b"]\x00\x00", "compressed by lzma", "xz --format=lzma -dc {} > {}.jsonl"),
    _Format(b"BZh", "compressed by bzip2", "bzip2 -dc {} > {}.jsonl"),
    _Format(b"\x04\x22\x4d\x18", "compressed by lz4", "lz4 -dc {} > {}.jsonl"),
    _Format(b"\x1f\x9d", "compressed by compress", "gzip -dc < {} > {}.jsonl"),
    _Format(b"PK\x03\x04", "a zip archive", "unzip {}"),
    _Format(b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x {}"),
    # The marks of UTF-32 begin with one of UTF-16.
    _Format(b"\xff\xfe\x00\x00", "text in UTF-32", "iconv -f UTF-32 -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(b"\x00\x00\xfe\xff", "text in UTF-32", "iconv -f UTF-32 -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(b"\xff\xfe", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(b"\xfe\xff", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(b"{\x00", "text in UTF-16", "iconv -f UTF-16LE -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(b"\x00{", "text in UTF-16", "iconv -f UTF-16BE -t UTF-8 {} > {}.utf8.jsonl"),
)
_TAR = _Format(b"", "a tar archive", "tar -xf {}")
# A line that holds an array of anything but objects is a bad line of its own.
_ARRAY = re.compile(rb"\s*\[\s*(?:\{|$)")
_OBJECT_OVER_LINES = re.compile(rb"\s*\{\s*\n\s*\"")


def refuse_other_format(path: str, head: bytes, *, is_compressed: bool) -> None:
    """Raises ValueError if a file does not hold JSON lines.

    head: the first bytes of its text, HEAD_BYTES if it has as many. is_compressed: the text was decompressed.
    """
    found = next((some for some in _FORMATS if head.startswith(some.begins)), None)
    if found is None and head[_TAR_MAGIC] == b"ustar":
        found = _TAR
    elif found is None and _ARRAY.match(head):
        found = _Format(b"", "one JSON array", "jq -c '.[]' {} > {}.jsonl")
    elif found is None and _OBJECT_OVER_LINES.match(head):
        found = _Format(b"", "JSON with objects over several lines", "jq -c . {} > {}.jsonl")
    if found is not None:
        is_what = f"holds, compressed, what is {found.what}" if is_compressed else f"is {found.what}"
        first = "decompress it; then this" if is_compressed else "this"
        remedy = found.remedy.replace("{}", shlex.quote(os.path.splitext(path)[0] if is_compressed else path))
        raise ValueError(f"{path} {is_what}, but JSON lines are needed; {first} makes them: {remedy}")
