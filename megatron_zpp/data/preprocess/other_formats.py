"""Recognizes files that are not JSON lines by their first bytes, and says what makes JSON lines of them.

Line by line they would only be bad lines, and --skip-invalid would leave a whole file out.
"""

import os
import re
import shlex
from typing import NamedTuple

from megatron_zpp.system.user_error import UserError

HEAD_BYTES = 512  # the first record of a tar archive


class _Format(NamedTuple):
    """begins: matches what a file of this format begins with. what: in words. remedy: a shell command with {} for the file."""

    begins: bytes
    what: str
    remedy: str


_BY_PANDAS = (
    'python -c \'import sys, pandas, pyarrow.ipc; {}.to_json(sys.argv[1] + ".jsonl", orient="records", lines=True, force_ascii=False)\' '
)
# The first that matches counts: the marks of UTF-32 begin with those of UTF-16.
_FORMATS = (
    _Format(rb"PAR1", "a Parquet file", _BY_PANDAS.format("pandas.read_parquet(sys.argv[1])") + "{}"),
    _Format(rb"ARROW1", "an Arrow file", _BY_PANDAS.format("pandas.read_feather(sys.argv[1])") + "{}"),
    _Format(rb"\xff{4}", "an Arrow stream", _BY_PANDAS.format("pyarrow.ipc.open_stream(sys.argv[1]).read_pandas()") + "{}"),
    _Format(rb"\xfd7zXZ\x00", "compressed by xz", "xz -dc {} > {}.jsonl"),
    _Format(rb"\]\x00\x00", "compressed by lzma", "xz --format=lzma -dc {} > {}.jsonl"),
    _Format(rb"BZh", "compressed by bzip2", "bzip2 -dc {} > {}.jsonl"),
    _Format(rb"\x04\x22\x4d\x18", "compressed by lz4", "lz4 -dc {} > {}.jsonl"),
    _Format(rb"\x1f\x9d", "compressed by compress", "gzip -dc < {} > {}.jsonl"),
    _Format(rb"PK\x03\x04", "a zip archive", "unzip {}"),
    _Format(rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x {}"),
    _Format(rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff", "text in UTF-32", "iconv -f UTF-32 -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(rb"\xff\xfe|\xfe\xff", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(rb"\{\x00", "text in UTF-16", "iconv -f UTF-16LE -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(rb"\x00\{", "text in UTF-16", "iconv -f UTF-16BE -t UTF-8 {} > {}.utf8.jsonl"),
    _Format(rb"(?s:.{257})ustar", "a tar archive", "tar -xf {}"),
    # A line that holds an array of anything but objects is a bad line of its own.
    _Format(rb"\s*\[\s*(?:\{|$)", "one JSON array", "jq -c '.[]' {} > {}.jsonl"),
    _Format(rb"\s*\{\s*\n\s*\"", "JSON with objects over several lines", "jq -c . {} > {}.jsonl"),
)


def refuse_other_format(path: str, head: bytes, *, is_compressed: bool) -> None:
    """Raises UserError if a file does not hold JSON lines.

    head: the first bytes of its text, HEAD_BYTES if it has as many. is_compressed: the text was decompressed.
    """
    found = next((some for some in _FORMATS if re.match(some.begins, head)), None)
    if found is not None:
        is_what = f"holds, compressed, what is {found.what}" if is_compressed else f"is {found.what}"
        first = "decompress it; then this" if is_compressed else "this"
        remedy = found.remedy.replace("{}", shlex.quote(os.path.splitext(path)[0] if is_compressed else path))
        raise UserError(f"{path} {is_what}, but JSON lines are needed; {first} makes them: {remedy}")
