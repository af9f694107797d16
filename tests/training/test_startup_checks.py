from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_zpp.training import startup_checks
from megatron_zpp.training.memory_need import AvailableMemory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_available_memory_is_the_least_of_all_ranks_and_of_a_gpu_what_is_left_after_the_start(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeWorld:
        rank = 1

    world: Any = FakeWorld()
    world.device = torch.device(device)
    monkeypatch.setattr(startup_checks, "bytes_for_rank", lambda device, ranks: {"cpu": 70, "cuda": 50}[device.type] // ranks)
    monkeypatch.setattr(startup_checks, "gather_texts", lambda own: [json.dumps([40, None]), own])
    of_device = min(40, {"cpu": 35, "cuda": 25}[device])
    assert startup_checks.available_memory(world, ["a", "a", "b"]) == AvailableMemory(of_device, 35, is_after_start=device == "cuda")
