"""docs/one_step.md leads through the files that one training step executes: those that a traced step of a real run has called."""

from __future__ import annotations

import re

import pytest
from harness.executed_step import Chain, ExecutedStep, executed_step
from harness.places import ROOT
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY

PAGE = (ROOT / "docs" / "one_step.md").read_text(encoding="utf-8")
STEP = PAGE.split("## The step\n")[1].split("\n## ")[0]
TABLE = {file: int(lines) for file, lines in re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", STEP, re.MULTILINE)}
BLOCKS = re.findall(r"```text\n(.*?)```", STEP, re.DOTALL)
WALK = STEP[STEP.index("```") :]
CORE = ("zero", "comm", "parallel")
ZEROPP = "--zero-stage 3 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2"


def lines_of(file: str) -> int:
    return len((ROOT / "megatron_zpp" / file).read_text(encoding="utf-8").splitlines())


def of_core(files: set[str]) -> set[str]:
    return {file for file in files if file.split("/")[0] in CORE}


def other_rooms() -> set[str]:
    """The files around the step, as the page lists them by room; those of `ops` depend on whether kernels are built."""
    found = set()
    for rooms, files in re.findall(r"^\| ([a-z, ]+) \| ([\w, ]+) \|$", STEP, re.MULTILINE):
        names = files.split(", ")
        found |= {
            f"{room}/{name}.py" for room in rooms.split(", ") for name in names if (ROOT / "megatron_zpp" / room / f"{name}.py").exists()
        }
    return found


@pytest.mark.gloo
def test_the_page_has_the_files_of_a_traced_step_and_the_way_from_a_hook_to_its_collective(ranks: RankPool) -> None:
    flags = [*TINY, *ZEROPP.split(), *"--train-iters 3 --global-batch-size 8".split()]
    step: ExecutedStep
    for step in ranks.run(2, 2, executed_step, flags):
        assert of_core(step.files) == set(TABLE)
        assert {file for file in step.files - set(TABLE) if not file.startswith("ops/")} == other_rooms()
        chain: Chain = tuple(BLOCKS[1].split())
        to_lane, (launch, collective) = chain[:-2], chain[-2:]
        assert to_lane in step.to_lane
        assert max(map(len, step.to_lane)) == len(to_lane)
        on_thread = ("comm/lanes.py:run", "comm/lanes.py:_launch")
        assert step.to_collective == {(*on_thread, launch, collective), (*on_thread, launch, "comm/backend.py:exchange")}
    print(f"{len(TABLE)} files of {CORE}, {sum(map(lines_of, TABLE))} lines; {len(chain)} calls from a hook to the collective")


def test_the_walk_names_every_file_of_its_table_and_no_others_of_these_rooms() -> None:
    named = set(re.findall(r"\w+/\w+\.py", WALK))
    assert of_core(named) == set(TABLE) and named - set(TABLE) <= other_rooms()


def test_the_numbers_of_the_page_are_those_of_its_table() -> None:
    files, lines = re.search(r"executes these (\d+) files .*?: ([\d,]+) lines", STEP, re.DOTALL).groups()  # type: ignore[union-attr]
    assert int(files) == len(TABLE)
    assert abs(int(lines.replace(",", "")) - sum(map(lines_of, TABLE))) <= 250
    for file, said in TABLE.items():
        assert abs(said - lines_of(file)) <= max(25, said // 4), file
