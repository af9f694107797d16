"""Plain weights of a checkpoint, and the memory that making them takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import consolidate_checkpoint
import pytest
import torch
from safetensors.torch import load_file
from small_gpt import small_gpt
from test_generate_text import write_checkpoint
from tool import ROOT

from megatron_zpp.checkpoint.release import write_release
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec

UNITS, UNIT_NUMEL = 16, 2 << 20
UNIT_BYTES = UNIT_NUMEL * 4
MEASURED = """
import resource, sys
sys.path[:0] = ["tools", "."]
import consolidate_checkpoint
from megatron_zpp.checkpoint import reader
def peak_bytes(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak_bytes()
sys.argv = ["consolidate_checkpoint.py", *sys.argv[1:]]
consolidate_checkpoint.main()
print(peak_bytes() - before)
"""


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_files_hold_the_main_weights_under_our_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, torch_dtype: torch.dtype
) -> None:
    model = small_gpt()
    write_checkpoint(tmp_path / "saved", model)
    arguments = ["--load", str(tmp_path / "saved"), "--output", str(tmp_path / "plain"), "--dtype", dtype]
    monkeypatch.setattr(sys, "argv", ["consolidate_checkpoint.py", *arguments])
    consolidate_checkpoint.main()
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], weight.to(torch_dtype)) for name, weight in model.state_dict().items())
    assert json.loads((tmp_path / "plain" / "flags.json").read_text())["model"]["num_layers"] == 2
    with pytest.raises(SystemExit) as ended:
        consolidate_checkpoint.main()
    assert ended.value.code == 2 and "exists already" in capsys.readouterr().err


def test_memory_is_that_of_one_unit_however_large_the_model(tmp_path: Path) -> None:
    """The unit as read and as cast, and the buffers of two reads; the model has 16 units."""
    names = [f"blocks.{index}.weight" for index in range(UNITS)]
    values = torch.arange(UNIT_NUMEL, dtype=torch.float32).view(1024, -1)
    units = [UnitSpec(name, (ParamSpec(name, tuple(values.shape), lambda start, stop: values, weight_decay=True),)) for name in names]
    write_release(tmp_path / "saved", units, lambda name: values, {})
    arguments = ["--load", tmp_path / "saved", "--output", tmp_path / "plain", "--dtype", "bfloat16", "--max-shard-size", "0.02"]
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    taken_bytes = int(done.stdout.splitlines()[-1])
    assert taken_bytes < 6 * UNIT_BYTES < UNITS * UNIT_BYTES / 2
    index = json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == UNITS * UNIT_NUMEL * 2 and set(index["weight_map"]) == set(names)
