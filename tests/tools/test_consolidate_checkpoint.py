"""The plain weights of a checkpoint, and the memory that the tool needs to write them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import consolidate_checkpoint
import pytest
import torch
from harness.small_gpt import small_gpt
from harness.tool import run_with_tools
from safetensors.torch import load_file
from test_generate_text import write_checkpoint

from megatron_zpp.checkpoint.export import new_folder
from megatron_zpp.checkpoint.release import write_release
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec

UNITS, UNIT_NUMEL = 2, 32 << 20
UNIT_BYTES = UNIT_NUMEL * 4
NAMES = [f"blocks.{index}.weight" for index in range(UNITS)]
MEASURED = """
import json, sys
from pathlib import Path
import consolidate_checkpoint, convert_from_hf, convert_to_hf, inspect_checkpoint
import torch
def peak_bytes():  # of this program; getrusage would count the larger process that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
before = peak_bytes()
sys.argv = ["consolidate_checkpoint.py", *sys.argv[1:]]
consolidate_checkpoint.main()
facts = {"taken_bytes": peak_bytes() - before, "modules": sorted(sys.modules), "has_group": torch.distributed.is_initialized()}
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def consolidated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder of two units of 128 MiB, written by the tool in its own process, and the output of that process."""
    folder = tmp_path_factory.mktemp("large")
    values = torch.arange(UNIT_NUMEL, dtype=torch.float32).view(1024, -1)
    specs = [ParamSpec(name, Division.undivided(tuple(values.shape)), lambda start, stop: values, weight_decay=True) for name in NAMES]
    write_release(folder / "saved", [UnitSpec(spec.name, (spec,)) for spec in specs], lambda name: values, {})
    arguments = ["--load", folder / "saved", "--output", folder / "plain", "--dtype", "bfloat16", "--max-shard-size", "0.08"]
    done = run_with_tools("-c", MEASURED, *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return folder / "plain", json.loads(done.stdout.splitlines()[-1])


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


def test_memory_is_a_constant_that_is_less_than_one_unit_however_large_units_are(consolidated: tuple[Path, dict[str, Any]]) -> None:
    """The memory is 16 MiB of read buffers, parts of 8 MiB and their casts until they have checksums, and what the allocator keeps."""
    folder, facts = consolidated
    assert facts["taken_bytes"] < UNIT_BYTES
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == UNITS * UNIT_NUMEL * 2 and set(index["weight_map"]) == set(NAMES)


def test_the_tools_need_neither_transformers_nor_a_process_group(consolidated: tuple[Path, dict[str, Any]]) -> None:
    assert "convert_to_hf" in consolidated[1]["modules"] and "transformers" not in consolidated[1]["modules"]
    assert not consolidated[1]["has_group"]


def test_the_working_folder_is_an_output_if_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with new_folder(Path(".")) as unfinished:
        (unfinished / "file").touch()
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["file"]
