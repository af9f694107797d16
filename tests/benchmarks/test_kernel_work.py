"""benchmarks/kernel_work.py on few values: what the kernels ask of a GPU's memory."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import kernel_work
from testbed.kernels.device_work import Work

pytestmark = pytest.mark.compiles

# A warp writes the 4-bit codes of 4 values per thread, 8 neighbouring threads at a time, so half of every sector.
HALF_FILLED = {("INT4", name) for name in ("encode fp32", "decode to fp32", "decode, add mean of 2", "decode, add rotated mean of 2")}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_accesses_of_a_warp_fill_the_sectors_that_they_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_work, "RUN_NUMEL", 4096)
    monkeypatch.setattr(sys, "argv", ["kernel_work.py", "--output", str(tmp_path / "found.json")])
    kernel_work.main()
    calls = [Work(**call) for call in json.loads((tmp_path / "found.json").read_text())["calls"]]
    found = {(call.codes, call.name): call.sector_bytes / call.nbytes for call in calls}
    assert {name for name, ratio in found.items() if ratio > 1.04} == HALF_FILLED
    assert max(found.values()) < 1.12
