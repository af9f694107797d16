"""The memory that a rank may use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_zpp.monitor.available_memory import CONTROL_GROUP, HOST_MEMORY, available_host_bytes, bytes_for_rank

MEMORY = "MemTotal:       24690168 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\nBuffers:            1234 kB\n"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMORY)
    return tmp_path


def available(host: Path, **group: str) -> int | None:
    for name, text in group.items():
        (host / f"memory.{name}").write_text(text)
    return available_host_bytes(host / "meminfo", host)


def test_a_host_without_a_control_group_has_what_linux_calls_available(host: Path) -> None:
    assert available(host) == 20000000 * 1024


def test_a_control_group_leaves_its_limit_less_what_is_held_and_cached_files_are_not_held(host: Path) -> None:
    assert available(host, max="1000000\n", current="700000\n", stat="anon 100\nactive_file 300000\ninactive_file 200000\n") == 800000


@pytest.mark.parametrize(("limit", "current"), [("max\n", "5\n"), (str(1 << 60), "5\n")])
def test_a_control_group_without_a_limit_below_the_hosts_changes_nothing(host: Path, limit: str, current: str) -> None:
    assert available(host, max=limit, current=current) == 20000000 * 1024


def test_a_full_control_group_leaves_nothing(host: Path) -> None:
    assert available(host, max="1000\n", current="2000\n") == 0


def test_without_proc_nobody_can_tell(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path / "meminfo", tmp_path) is None


def test_ranks_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_zpp.monitor.available_memory.available_host_bytes", lambda host_memory, control_group: 1001)
    assert [bytes_for_rank(torch.device("cpu"), ranks) for ranks in (1, 4)] == [1001, 250]
    monkeypatch.setattr("megatron_zpp.monitor.available_memory.available_host_bytes", lambda host_memory, control_group: None)
    assert bytes_for_rank(torch.device("cpu"), 4) is None


@pytest.mark.parametrize(("devices", "ranks", "share"), [(1, 1, 1000), (2, 2, 1000), (1, 4, 250), (2, 3, 500), (8, 4, 1000)])
def test_ranks_share_what_is_free_of_a_gpu_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch, devices: int, ranks: int, share: int
) -> None:
    free_and_total = 1000, 1300
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: free_and_total)
    assert bytes_for_rank(torch.device("cuda", 0), ranks) == share


@pytest.mark.skipif(not HOST_MEMORY.exists(), reason="no /proc here")
def test_this_machine_has_some_memory_and_less_than_a_petabyte() -> None:
    found = available_host_bytes(HOST_MEMORY, CONTROL_GROUP)
    assert found is not None and 2**20 < found < 2**50
