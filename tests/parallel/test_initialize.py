from __future__ import annotations

import pytest
import torch

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.data.split import parse_split
from megatron_zpp.parallel.initialize import choose_device, is_mistake, joined_errors
from megatron_zpp.parallel.launch import Launch


def test_gloo_means_the_cpu_whatever_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, 8)
    assert choose_device(Launch(0, 1, 0, 1), "gloo") == torch.device("cpu")


def test_nccl_without_a_gpu_is_refused_with_flag_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match="--distributed-backend nccl needs a GPU.*leave the flag out"):
        choose_device(Launch(0, 1, 0, 1), "nccl")


def test_each_local_rank_gets_a_gpu_of_its_own_or_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, 2)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert choose_device(Launch(1, 4, 1, 4), None) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="local rank 2 finds only 2 GPUs.*start at most 2 ranks"):
        choose_device(Launch(2, 4, 2, 4), None)


def test_no_error_on_any_rank_joins_to_nothing() -> None:
    assert joined_errors(["", "", ""]) == ""


def test_the_same_mistake_everywhere_is_said_once() -> None:
    assert joined_errors(["bad flag"] * 3) == "bad flag"


def test_a_mistake_of_some_ranks_names_them_one_line_per_message_in_the_order_of_ranks() -> None:
    joined = joined_errors(["", "no such file", "", "no such file", "full disk"])
    assert joined.splitlines() == ["no such file (on rank 1, 3 of 5)", "full disk (on rank 4 of 5)"]


def test_an_error_that_the_package_raises_is_a_mistake_and_any_other_a_bug() -> None:
    for provoke in (lambda: parse_flags(["--no-such-flag"]), lambda: parse_split("a,b")):
        with pytest.raises(ValueError, match=".") as found:
            provoke()
        assert is_mistake(found.value)
    for provoke in (lambda: torch.zeros(2).numpy().reshape(3), lambda: joined_errors(zip([1], [], strict=True))):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=".") as found:
            provoke()
        assert not is_mistake(found.value)


def _pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
