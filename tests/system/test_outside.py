"""Files from outside: only regular ones of a limited size are read, and whatever is wrong in one is one sentence with the key."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_zpp.config.data_sources import read_sources
from megatron_zpp.config.deepspeed import read_object
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.system.outside import MOST_DEPTH, Members, OutsideFile, open_regular


def outside(path: Path, **options: object) -> OutsideFile:
    return OutsideFile(path, f"--flag {path}", "give another.", FlagError, **options)


def members(tmp_path: Path, text: str, **options: bool) -> Members:
    (tmp_path / "file").write_text(text, encoding="utf-8")
    return outside(tmp_path / "file").members(**options)


def test_a_name_that_no_file_can_have_is_no_missing_file_and_refused() -> None:
    file = outside(Path("a\0b"))
    assert not file.is_missing()
    with pytest.raises(FlagError, match="null"):
        file.text()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [make_pipe, make_link_to_zeros, make_socket, Path.mkdir])
def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match="not a regular file|Is a directory|No such device"):
        open_regular(tmp_path / "file")
    with pytest.raises(FlagError, match=f"^--flag {tmp_path}/file cannot be read \\(.*\\); give another.$"):
        outside(tmp_path / "file").members()


def test_a_missing_file_and_a_name_that_no_file_can_have_are_named(tmp_path: Path) -> None:
    assert outside(tmp_path / "none").is_missing()
    for name in ("none", "a\0b", "x" * 5000):
        with pytest.raises(FlagError, match="cannot be read"):
            outside(tmp_path / name).text()


def test_a_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert outside(tmp_path / "file", most_bytes=5).content() == b"12345"
    with pytest.raises(FlagError, match="has more than 4 bytes; give another"):
        outside(tmp_path / "file", most_bytes=4).content()


def test_text_is_utf_8_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfa\xc3\xa9")
    assert outside(tmp_path / "file").text() == "aé"
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(FlagError, match="is not UTF-8 text \\(byte 2\\)"):
        outside(tmp_path / "file").text()


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("{", "is not JSON: line 1, column 2"),
        ("3", "file must be a JSON object, not 3"),
        ("[" * 200_000, "is nested more than 64 levels deep"),
        ('{"a":' * 200_000, "is nested more than 64 levels deep"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "is nested more than 64 levels deep"),
        ('{"a": {"b": [0, NaN]}}', ": a.b[1] must be a finite number below 2^63, not NaN"),
        ('{"a": 1e999}', "a must be a finite number below 2^63, not Infinity"),
        ('{"a": -Infinity}', "a must be a finite number below 2^63, not -Infinity"),
        ('{"a": 9223372036854775808}', "a must be a finite number below 2^63, not 9223372036854775808"),
        (f'{{"a": {"9" * 5000}}}', "is not usable JSON"),
        ("NaN", "file must be a finite number below 2^63, not NaN"),
    ],
)
def test_json_that_nothing_here_can_use_is_refused(tmp_path: Path, text: str, finding: str) -> None:
    with pytest.raises(FlagError) as error:
        members(tmp_path, text)
    assert finding in str(error.value) and str(error.value).endswith("; give another.")


def test_as_many_levels_as_allowed_and_any_numbers_are_read_where_they_may_be(tmp_path: Path) -> None:
    deepest = "[" * (MOST_DEPTH - 1) + "]" * (MOST_DEPTH - 1)
    assert members(tmp_path, f'{{"a": {deepest}}}').any("a") == json.loads(deepest)
    assert members(tmp_path, f'{{"a": {10**30}, "b": Infinity}}', has_any_numbers=True).any("a") == 10**30


def test_a_key_that_stands_twice_is_refused_where_keys_must_be_unique(tmp_path: Path) -> None:
    assert members(tmp_path, '{"a": 1, "a": 2}').any("a") == 2
    with pytest.raises(FlagError, match="^[^;(]* has a twice in one object; give another.$"):
        members(tmp_path, '{"b": {"a": 1, "a": 2}}', has_unique_keys=True)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Members.count, ["0", "9223372036854775807"], ["-1", "1.0", "true", '"1"', "null", "[]"]),
        (Members.positive_count, ["1"], ["0", "true", "2.5"]),
        (Members.whole_number, ["-1"], ["1.5", "false"]),
        (Members.number, ["1", "2.5", "-0.5"], ["true", '"1"', "null"]),
        (Members.number_or_nan, ["1", "2.5"], ["true", "null"]),
        (Members.text, ['"a"', '""'], ["1", "null", '"\\ud800"']),
        (Members.switch, ["true"], ["1", '"true"', "null"]),
        (Members.counts, ["[]", "[1, 2]"], ["1", "[-1]", "[true]", '["1"]', "{}"]),
        (Members.texts, ['["a"]'], ['"a"', "[1]", '["\\udc00"]']),
        (Members.list, ["[{}]"], ["{}", '"a"']),
        (Members.members, ["{}"], ["[]", "null"]),
    ],
)
def test_a_member_of_another_kind_is_refused_by_its_key(
    tmp_path: Path, kind: Callable[..., object], good: list[str], bad: list[str]
) -> None:
    for text in good:
        kind(members(tmp_path, f'{{"outer": {{"key": {text}}}}}').members("outer"), "key")
    for text in bad:
        with pytest.raises(FlagError, match=r": outer\.key must be .*, not .*; give another\.$"):
            kind(members(tmp_path, f'{{"outer": {{"key": {text}}}}}').members("outer"), "key")
    with pytest.raises(FlagError, match=r"lacks outer\.key"):
        kind(members(tmp_path, '{"outer": {}}').members("outer"), "key")


def test_objects_of_a_list_and_unknown_keys_are_named_by_place(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match=r": list\[1\] must be an object, not 3"):
        list(members(tmp_path, '{"list": [{}, 3]}').list_of_members("list"))
    with pytest.raises(FlagError, match=r": list\[0\]\.key must be a whole number from 0 to 2\^63 - 1, not -1"):
        next(members(tmp_path, '{"list": [{"key": -1}]}').list_of_members("list")).count("key")
    (tmp_path / "file").write_text('[{"key": 1}, 3]')
    with pytest.raises(FlagError, match=r": \[1\] must be an object, not 3"):
        list(outside(tmp_path / "file").list_of_members())
    (tmp_path / "file").write_text("{}")
    with pytest.raises(FlagError, match="file must be a JSON list, not {}"):
        outside(tmp_path / "file").entries()
    with pytest.raises(FlagError, match="has the unknown key other"):
        members(tmp_path, '{"other": 1}').require_only({"key"})


@pytest.mark.parametrize(
    ("flag", "read"),
    [
        ("--deepspeed_config", read_object),
        ("--data-args-path", lambda path: read_sources(DataConfig(data_args_path=path))),
        ("--per-split-data-args-path", lambda path: read_sources(DataConfig(per_split_data_args_path=path))),
    ],
)
def test_files_of_flags_are_read_in_this_way(tmp_path: Path, flag: str, read: Callable[[str], object]) -> None:
    make_pipe(tmp_path / "pipe")
    with pytest.raises(FlagError, match=f"{flag} {tmp_path}/pipe cannot be read \\(it is a pipe, not a regular file\\)"):
        read(str(tmp_path / "pipe"))
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    with pytest.raises(FlagError, match=f"{flag} {tmp_path}/large has more than"):
        read(str(tmp_path / "large"))
    if flag != "--data-args-path":
        (tmp_path / "deep").write_text("[" * 100_000)
        with pytest.raises(FlagError, match="is nested more than 64 levels deep"):
            read(str(tmp_path / "deep"))
