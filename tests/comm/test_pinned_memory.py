"""Pinned memory of exactly the bytes asked for, with a stand-in for CUDA's runtime."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron_zpp.comm.pinned_memory import pinned_zeros
from megatron_zpp.comm.streams import CudaStreams


class FakeRuntime:
    """Notes what is pinned, by address, and what is let go. code: that every call returns."""

    def __init__(self, code: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.released: list[int] = []
        self._code = code

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:
        self.released.append(address)
        return self._code


def give_cuda(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


def test_no_more_is_pinned_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    give_cuda(monkeypatch, runtime)
    values = pinned_zeros(1025, torch.float32)
    assert runtime.pinned == {values.data_ptr(): 4 * 1025} and not values.any()


def test_a_gpus_large_memory_of_the_host_is_pinned_so_and_what_is_not_copied_from_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    give_cuda(monkeypatch, runtime)
    streams, numel = CudaStreams(torch.device("cuda")), 2**18 + 1
    values = streams.host_memory(numel, torch.float32)
    streams.host_memory(numel, torch.float32, is_pinned=False)
    assert runtime.pinned == {values.data_ptr(): 4 * numel}


def test_memory_stays_pinned_while_a_part_of_it_lives_and_is_let_go_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    give_cuda(monkeypatch, runtime)
    values = pinned_zeros(100, torch.float32)
    address, part = values.data_ptr(), values[40:60]
    del values
    gc.collect()
    assert runtime.released == []
    del part
    gc.collect()
    assert runtime.released == [address]


def test_nothing_of_no_bytes_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    give_cuda(monkeypatch, runtime)
    assert pinned_zeros(0, torch.float32).numel() == 0 and runtime.pinned == {}


def test_memory_that_cannot_be_pinned_is_an_error_with_bytes_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    give_cuda(monkeypatch, FakeRuntime(code=2))
    with pytest.raises(RuntimeError, match=r"^400 bytes of host memory could not be pinned \(CUDA error 2\); free some.*ulimit -l"):
        pinned_zeros(100, torch.float32)
