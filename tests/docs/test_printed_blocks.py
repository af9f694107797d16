"""What the pages print is what programs print or compute today: log lines, manifests, drawings. Programs in Python run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from harness.example_runs import output_of_program
from harness.pages import FENCED, PAGES, SHELL, text_of
from harness.rank_pool import RankPool
from harness.sample_report import REPORT

from megatron_zpp.comm.code import EXACT, Code, SliceShape
from megatron_zpp.data.preprocess.document_encoder import read_texts
from megatron_zpp.monitor.memory import MemoryReading, memory_line
from megatron_zpp.monitor.training_line import megatron_lm_line
from megatron_zpp.parallel.topology import Link, Topology

CHECKPOINTS, FSDP2, GLOSSARY, LOGS = "docs/checkpoints.md", "docs/coming_from_fsdp2.md", "docs/glossary.md", "docs/logs.md"
DATA, ISLANDS = "docs/data.md", "docs/islands.md"
# Blocks that are no commands: page and beginning, with the test of what they show, or the reason why there is none.
BLOCKS = {
    (CHECKPOINTS, "DIR/latest"): "tests/docs/test_commands_run.py, by the files of a checkpoint",
    (CHECKPOINTS, "on node 0"): "tests/checkpoint/test_parts.py, by the files of every disk",
    (CHECKPOINTS, '"shapes"'): "test_a_matrix_in_two_parts_of_columns_is_read_as_it_is_drawn",
    (CHECKPOINTS, "import json"): "tests/checkpoint/test_resharding.py, and by the drawn matrix",
    (FSDP2, "import torch"): "test_the_program_for_a_module_of_your_own_trains_on_two_ranks_and_goes_on_from_what_it_saved",
    (GLOSSARY, "                       column"): "test_ranks_own_the_slices_and_share_the_links_that_are_drawn",
    (GLOSSARY, "    rank 0 climbs"): "test_ranks_own_the_slices_and_share_the_links_that_are_drawn",
    (GLOSSARY, "    | codes of"): "test_the_payload_has_the_bytes_that_are_drawn",
    (DATA, "import json"): "test_the_program_for_plain_text_writes_lines_that_are_read",
    ("docs/house.md", " 9  entry"): "test_names_in_docs.py, by rooms; the import contract has the floors",
    (ISLANDS, "import torch"): "test_the_program_for_islands_trains_on_two_islands_and_goes_on_from_what_they_saved",
    ("docs/importing.md", "blocks.1"): "tests/docs/test_commands_run.py",
    ("docs/long_sequences.md", "    4 data ranks"): "tests/parallel, by groups of context ranks",
    ("docs/memory.md", "    gradients"): "tests/integration/test_offload_in_runs.py, by what a run does",
    ("docs/one_step.md", ""): "tests/docs/test_one_step.py",
    ("docs/tensor_parallel.md", "    8 ranks"): "tests/parallel, by groups of tensor ranks",
    ("docs/worked_example.md", ""): "tests/docs/test_worked_example.py",
}
FLAGS = "flags"  # test_architectures_page.py
WORLD = Topology(4, 2, 2)


def blocks_of(page: str) -> list[str]:
    return [block for language, block in FENCED.findall(text_of(page)) if language not in (*SHELL, FLAGS)]


def block_of(page: str, beginning: str) -> str:
    (block,) = (block for block in blocks_of(page) if block.startswith(beginning))
    return block


def test_every_block_has_a_row_and_every_row_a_block() -> None:
    blocks = [(page, block) for page in PAGES for block in blocks_of(page)]
    for page, block in blocks:
        assert any(page == of_page and block.startswith(beginning) for of_page, beginning in BLOCKS), (page, block)
    for of_page, beginning in BLOCKS:
        assert any(page == of_page and block.startswith(beginning) for page, block in blocks), (of_page, beginning)


def test_the_log_lines_have_the_form_of_today() -> None:
    page = " ".join(text_of(LOGS).split())
    at = datetime(2026, 8, 22, 15, 4, 5, 678)
    line = megatron_lm_line(replace(REPORT, train_iters=500), at, with_throughput=True)
    assert " ".join(line.split()) in page
    shown = re.findall(r"`(\[Rank 0\] [^`]+)`", text_of(LOGS))
    mib = [float(number) * 2**20 for number in re.findall(r"(\d+\.\d+)", shown[0])]
    assert [memory_line(0, 100, MemoryReading(*map(int, mib)))] == shown


def test_a_matrix_in_two_parts_of_columns_is_read_as_it_is_drawn(tmp_path: Path) -> None:
    shapes, *rest = block_of(CHECKPOINTS, '"shapes"').splitlines()
    pieces = [json.loads(line) for line in rest if line.startswith("{")]
    drawn = [line.split("   ")[0].replace("|", " ").split() for line in (line.strip() for line in rest) if line[:1] in ("a", "b")]
    (tmp_path / "manifest.json").write_text(json.dumps({**json.loads(f"{{{shapes}}}"), "pieces": pieces}))
    for number, name in enumerate("ab"):
        values = 10 * number + np.arange(6, dtype="<f4")
        (tmp_path / name).write_bytes(bytes(pieces[0]["offsets"]["weight"]) + values.tobytes())
    names: dict[str, object] = {}
    exec(block_of(CHECKPOINTS, "import json").replace("DIR/iter_0000100", str(tmp_path)), names)
    found = names["read"]("p", "weight")  # type: ignore[operator]
    assert found.tolist() == [[10 * "ab".index(cell[0]) + int(cell[1]) for cell in row] for row in drawn]


def test_the_program_for_plain_text_writes_lines_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_text.txt").write_text('a "b"\nc\n\nd é', encoding="utf-8")
    exec(block_of(DATA, "import json"), {})
    lines = Path("my_text.jsonl").read_bytes().splitlines()
    assert [read_texts(line, ["text"])["text"] for line in lines] == ['a "b"\nc', "d é"]


def test_ranks_own_the_slices_and_share_the_links_that_are_drawn() -> None:
    drawn = re.findall(r"rank (\d) \[(\d)\]", block_of(GLOSSARY, "                       column"))
    assert [WORLD.slice_of(int(rank)) for rank, _ in drawn] == [int(owned) for _, owned in drawn]
    links = re.findall(r"--(inter|intra): with rank (\d)-->", block_of(GLOSSARY, "    rank 0 climbs"))
    assert len(links) == 4
    for link, other in links:
        assert WORLD.members(Link[link.upper()], 0) == (0, int(other))


def test_the_payload_has_the_bytes_that_are_drawn() -> None:
    assert re.findall(r"-> (\d+)|= (\d+)", block_of(GLOSSARY, "    | codes of")) == [("", "256"), ("16", ""), ("16", "")]
    slice_shape = SliceShape(512, 6)
    assert Code(4).payload_bytes(slice_shape, element_bytes=2, block_numel=256) == 256 + 16 + 16
    assert f"takes {256 + 16 + 16} bytes instead of {EXACT.payload_bytes(slice_shape, element_bytes=2)}" in text_of(GLOSSARY)


OWN_MODULE = """
from torch import nn

class make_model(nn.Sequential):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(8, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden).relu()
        return self.head(hidden)

def loss_of(output):
    loss = (output - 1).square().mean()
    print(loss.item())
    return loss
"""


def test_the_program_for_a_module_of_your_own_trains_on_two_ranks_and_goes_on_from_what_it_saved(ranks: RankPool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    page = block_of(FSDP2, "import torch").replace('"checkpoints"', repr(str(tmp_path / "checkpoints"))).replace("1000 == 999", "10 == 9")
    found: list[float] = []
    for steps in (25, 40):
        program.write_text(f"{OWN_MODULE}\nsteps = {steps}\nbatch_of = lambda step: torch.arange(8)\n{page}")
        first, second = ranks.run(1, 2, output_of_program, str(program))
        assert first == second
        found += [float(line) for line in first.splitlines()]
    assert len(found) == 25 + 20 and found[20:25] == found[25:30]  # the second run begins after step 20
    assert found[-1] < 0.9 * found[0]


def test_the_program_for_islands_trains_on_two_islands_and_goes_on_from_what_they_saved(ranks: RankPool, tmp_path: Path) -> None:
    page = block_of(ISLANDS, "import torch").replace('"checkpoints"', repr(str(tmp_path / "checkpoints"))).replace("1000 == 999", "10 == 9")
    program = tmp_path / "program.py"
    found: list[list[float]] = []
    for steps in (25, 40):
        given = "batch_of = lambda step, share: (torch.arange(8) + share) % 8\nevaluate = lambda model: loss_of(model(torch.arange(8)))"
        program.write_text(f"{OWN_MODULE}\nsteps = {steps}\n{given}\n{page}")
        first, second = ([float(line) for line in printed.splitlines()] for printed in ranks.run(2, 1, output_of_program, str(program)))
        assert first[-1] == second[-1]  # both evaluate the same weights
        found.append(first)
    assert len(found[0]) == 25 + 1 and len(found[1]) == 20 + 1 and found[0][20:25] == found[1][:5]
    assert found[1][-1] < 0.9 * found[0][0]


@pytest.mark.parametrize("page", PAGES)
def test_programs_in_python_are_those_that_run(page: str) -> None:
    programs = [block for language, block in FENCED.findall(text_of(page)) if language == "python"]
    assert len(programs) == {CHECKPOINTS: 1, DATA: 1, FSDP2: 1, ISLANDS: 1}.get(page, 0)
