"""Hosts, slots, --include and --exclude: which slots are used, and which mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching.hostfile import Host, check_same_slots, exclude, include, read_hostfile

from megatron_zpp.system.user_error import UserError

HOSTS = [Host("a", (0, 1, 2, 3), 4), Host("b", (0, 1, 2, 3), 4), Host("c.d", (0, 1), 2)]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text, encoding="utf-8")
    return path


def test_hosts_are_read_in_their_order_and_comments_say_nothing(tmp_path: Path) -> None:
    text = "# all of them\nnode-2 slots=4 # the new one\n\n   10.0.0.1\tslots=8\n#node-3 slots=4\n"
    assert read_hostfile(written(tmp_path, text)) == [Host("node-2", (0, 1, 2, 3), 4), Host("10.0.0.1", tuple(range(8)), 8)]


@pytest.mark.parametrize(
    "text, named",
    [
        ("a slots=2\nb slots=2\na slots=4\n", "line 3: a is in the file twice"),
        ("a slots=2\nb\n", "line 2: 'b' is not a host; write it as: name slots=8"),
        ("a slots=two\n", "line 1: 'a slots=two' is not a host"),
        ("a slots=2 b slots=2\n", "line 1"),
        ("a slots=0\n", "line 1: a has no slots"),
        (
            "a slots=999999999999999999999999999999\n",
            "line 1: a has slots=999999999999999999999999999999; write a whole number from 1 to 4096",
        ),
        (f"a slots={'9' * 5000}\n", "line 1: a has slots=99.*; write a whole number from 1 to 4096"),
        ("a slots=\u0663\n", "line 1: a has slots=\u0663; write a whole number from 1 to 4096"),
        ("# nobody\n", "names no host"),
        ("a slots=1\n-oProxyCommand=date slots=1\n", "line 2: '-oProxyCommand=date' is not a host name"),
        ("a;b slots=1\n", "line 1: 'a;b' is not a host name; begin with"),
        ("me@node0 slots=1\n", "line 1: me@node0 names a user, but ranks meet at a host; write node0, and User me for it in ~/.ssh/config"),
    ],
)
def test_a_line_that_is_no_host_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_hostfile(written(tmp_path, text))


@pytest.mark.parametrize(
    "words, slots",
    [
        ("a", {"a": (0, 1, 2, 3)}),
        ("b:3,0@a", {"a": (0, 1, 2, 3), "b": (0, 3)}),
        ("c.d:1", {"c.d": (1,)}),
        ("a:0 @ b:0", {"a": (0,), "b": (0,)}),
    ],
)
def test_include_keeps_what_it_names_in_the_order_of_the_file(words: str, slots: dict[str, tuple[int, ...]]) -> None:
    assert {host.name: host.slots for host in include(HOSTS, words)} == slots
    assert list(slots) == [host.name for host in include(HOSTS, words)]


def test_exclude_drops_slots_and_whole_hosts() -> None:
    assert exclude(HOSTS, "a@b:0,2") == [Host("b", (1, 3), 4), Host("c.d", (0, 1), 2)]
    assert exclude(HOSTS, "c.d:0,1") == HOSTS[:2]


@given(st.dictionaries(st.sampled_from([host.name for host in HOSTS]), st.sets(st.integers(0, 1), min_size=1), min_size=1))
def test_what_is_included_and_what_is_excluded_make_the_whole(chosen: dict[str, set[int]]) -> None:
    words = "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in chosen.items())
    parts = [*include(HOSTS, words), *exclude(HOSTS, words)]
    assert sorted((host.name, slot) for host in parts for slot in host.slots) == sorted(
        (host.name, slot) for host in HOSTS for slot in host.slots
    )


@pytest.mark.parametrize(
    "words, named",
    [
        ("x", "'x' is not among the hosts, which are a, b, c.d"),
        ("a:4", "a has no slot 4, its slots are 0 to 3"),
        ("a:", "'' is not a list of slots; write them as a:0,1"),
        ("a:0-2", "'0-2' is not a list of slots"),
        ("a:0@a:1", "a is named twice"),
    ],
)
def test_a_choice_that_cannot_be_is_named(words: str, named: str) -> None:
    for flag, choose in (("--include", include), ("--exclude", exclude)):
        with pytest.raises(UserError, match=f"{flag} {words}: {named}"):
            choose(HOSTS, words)


def test_excluding_everything_is_refused() -> None:
    with pytest.raises(UserError, match="--exclude a@b@c.d leaves no slot"):
        exclude(HOSTS, "a@b@c.d")


def test_nodes_are_of_one_size() -> None:
    assert check_same_slots(HOSTS[:2]) == 4
    with pytest.raises(UserError, match="a has 4, b has 4, c.d has 2; give --num_gpus 2"):
        check_same_slots(HOSTS)
