"""benchmarks/gpu_table.py on files as gpu_half_hour.sh writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_table
from benchmarks.gpu import script
from benchmarks.report import ORIGIN

MACHINE = {
    "processor": "some processor",
    "cores": 16,
    "memory_gibibytes": 126,
    "gpu": "some GPU",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "python": "3.12.3",
    "torch": "2.11.0",
}
RECORD = {"lm_loss": 9.0, "elapsed_ms_per_iteration": 100.0, "tokens_per_second": 80_000.0, "mfu": 0.4, "max_memory_bytes": 3 << 30}
STEPS = {
    f"{name}{variant}": {"step_seconds": [0.1, 0.3, 0.2], "mfu": 0.4, "mfu_of_products": 0.5}
    for name in ("1 micro-batch", "8 micro-batches")
    for variant in ("", *(f", {some.name}" for some in gpu_table.VARIANTS))
}
COUNTED = json.loads(gpu_table.COUNTED.read_text())["calls"]
KERNELS = [
    {"codes": call["codes"], "op": call["name"], "share_of_copy": 0.984, "megabytes": megabytes}
    for call in COUNTED
    for megabytes in (1, gpu_table.MEGABYTES)
]
PARTS: tuple[dict[str, Any], ...] = (
    {
        "training": {**STEPS, "seconds_by_kind": {"attention": 0.01}, "used_bytes": 5, "reserved_bytes": 3},
        "speed": {"kernels": KERNELS},
    },
    {"offload": {"rates": {"down": 5e10, "up": 5e10}}},
    {"script": {some.name: [RECORD] * 9 for some in script.RUNS}},
    {"counters": {}},
)


def test_what_four_commands_have_found_is_kept_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, parts in zip(gpu_table.COMMANDS, PARTS, strict=True):
        reports = {name: {"status": "passed", "seconds": 7.0, "measured": measured} for name, measured in parts.items()}
        check = {"machine": MACHINE, "date": "2026-11-26T16:19:44+00:00", "sources": "d97b", "parts": reports}
        (tmp_path / number).mkdir()
        (tmp_path / number / "gpu_check.json").write_text(json.dumps(check))
    output = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", str(tmp_path), "--output", str(output)])
    gpu_table.main()
    found = json.loads(output.read_text())
    assert tuple(found)[: len(ORIGIN)] == ORIGIN and found["date"] == "2026-11-26" and len(found["kernels"]) == len(COUNTED)
    assert {name: part["status"] for name, part in found["parts"].items()} == dict.fromkeys(
        ("training", "speed", "offload", "script", "counters"), "passed"
    )
    runs, steps, kernels = capsys.readouterr().out.strip().split("\n\n")
    planned = [f"{one['planned_bytes'] / 2**30:.2f}" for one in found["runs"]]
    assert runs.splitlines()[2:] == [
        f"| {name} | 100.0 | 80,000 | 40.0 | 3.00 | {plan} |"
        for name, plan in zip(("125M, stage 3", "1.3B, stage 3", "1.3B, stage 1", "125M, stage 1"), planned, strict=True)
    ]
    assert steps.splitlines()[3] == "| defaults | 8 | 200.0 | 40.0 |" and len(steps.splitlines()) == 2 + 8
    assert len(kernels.splitlines()) == 2 + len(COUNTED)
    assert all(
        line.startswith(f"| {call['codes']} | {call['name']} | ") for line, call in zip(kernels.splitlines()[2:], COUNTED, strict=True)
    )
    assert all(line.endswith(" | 98 |") for line in kernels.splitlines()[2:])
