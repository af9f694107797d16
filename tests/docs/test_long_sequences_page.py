"""docs/long_sequences.md: the figures of its example are those of the plan."""

from __future__ import annotations

import re
import shlex

import pytest
from harness.places import ROOT

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.counted import in_gib
from megatron_zpp.config.schema import Config
from megatron_zpp.training.hardware import GIGABYTE, TERA, planned_machine
from megatron_zpp.training.members import MEMBERS, PlannedWorld
from megatron_zpp.training.plan.kinds import ACTIVATIONS, GRADIENTS, KEPT_INPUTS, OPTIMIZER, OTHER, PAYLOADS, WEIGHTS
from megatron_zpp.training.run_plan import RunPlan, plan_run

pytestmark = pytest.mark.pure

PAGE = (ROOT / "docs" / "long_sequences.md").read_text(encoding="utf-8").split("## An 8B model")[1]
WORLD, VOCABULARY = PlannedWorld(4, 8, is_on_gpu=True), 128256
MEMORY = re.findall(r"^\| ([Zl]\S+)((?: \| [\d.]+){6}) \| yes \|$", PAGE, re.MULTILINE)
TRAFFIC = re.findall(r"^\| ([Zl]\S+)((?: \| [\d.]+){3}) \|$", PAGE, re.MULTILINE)
SIZES = re.findall(r"^\| (\d) \| (\d+) \| (\S+) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+ GiB) \| ([\d.]+) \|$", PAGE, re.MULTILINE)


def given(tensor_ranks: int, context_ranks: int) -> Config:
    """The flags of the example's command, with other sizes of groups."""
    script = (ROOT / "scripts" / "models" / "llama3.1_8b.sh").read_text(encoding="utf-8")
    command = re.search(r'"\$\{MODEL_ARGS\[@\]\}" \\\n(.*?)```', PAGE, re.DOTALL)
    model = re.search(r"MODEL_ARGS=\((.*?)\)", script, re.DOTALL)
    if command is None or model is None:
        raise ValueError("the page has no command, or the script no model")
    sizes = f"--tensor-model-parallel-size {tensor_ranks} --context-parallel-size {context_ranks}"
    return parse_flags(shlex.split(f"{model[1]} {command[1]} {sizes}".replace("\\\n", " ")))


def plans(tensor_ranks: int, context_ranks: int) -> dict[str, RunPlan]:
    names = ("ZeRO-1", "ZeRO-3", "ZeRO++", "lean-1")
    flags = given(tensor_ranks, context_ranks)
    return {member.name: plan_run(flags, member, WORLD, VOCABULARY) for member in MEMBERS if member.name in names}


def seconds(plan: RunPlan) -> float:
    return plan.time(planned_machine(400, 100, 400 * TERA, is_on_gpu=True)).seconds


def test_the_tables_of_memory_and_of_bytes_are_the_plans_of_the_command() -> None:
    found = plans(1, 8)
    assert [name for name, _ in MEMORY] == [name for name, _ in TRAFFIC] == list(found)
    for (name, cells), (_, numbers) in zip(MEMORY, TRAFFIC, strict=True):
        plan, need = found[name], found[name].memory
        kinds = ((WEIGHTS,), (GRADIENTS,), (OPTIMIZER,), (PAYLOADS, OTHER), (ACTIVATIONS, KEPT_INPUTS))
        parts = (*(need.of(*some) for some in kinds), need.total)
        assert cells.split(" | ")[1:] == [f"{part / 2**30:.1f}" for part in parts]
        moved = (plan.node_bytes, plan.rank_bytes)
        assert numbers.split(" | ")[1:] == [*(f"{nbytes / GIGABYTE:.4g}" for nbytes in moved), f"{seconds(plan):.4g}"]


@pytest.mark.parametrize("row", SIZES, ids=lambda row: f"{row[0]} x {row[1]}")
def test_each_pair_of_sizes_is_planned_with_the_fastest_member(row: tuple[str, ...]) -> None:
    fastest = min(plans(int(row[0]), int(row[1])).values(), key=seconds)
    tensor, context = fastest.tensor_bytes / GIGABYTE, fastest.exchanges.context_bytes / GIGABYTE
    figures = (
        fastest.member.name,
        str(fastest.microbatches),
        f"{tensor:.4g}",
        f"{context:.4g}",
        in_gib(fastest.memory.total),
        f"{seconds(fastest):.4g}",
    )
    assert row[2:] == figures


def test_a_whole_sample_and_a_longer_one_need_what_the_text_says() -> None:
    zero3 = next(member for member in MEMBERS if member.name == "ZeRO-3")
    whole = plan_run(given(1, 1).with_values(global_batch_size=32), zero3, WORLD, VOCABULARY).memory
    assert f"its activations take {in_gib(whole.of(ACTIVATIONS))}, and a run with ZeRO-3 {in_gib(whole.total)}" in PAGE.replace("\n", " ")
    longer = given(1, 16).with_values(seq_length=2 * 131072, max_position_embeddings=2 * 131072)
    need = plan_run(longer, zero3, WORLD, VOCABULARY).memory
    assert f"256K tokens with C = 16 take {in_gib(need.total)}" in PAGE.replace("\n", " ")
