"""tools/plan_run.py: the plan takes seconds, and has the memory and bytes of the run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import plan_run
import pytest
from harness.closed_forms import Features, inter_node_bytes
from harness.patience import wait_until
from harness.places import ROOT
from harness.processes import children_of, is_alive
from harness.stored_manifest import manifest_of_run, write_manifest
from harness.tool import run_tool, run_with_tools
from harness.trained_tokenizers import write_gpt2_files
from hypothesis import given
from hypothesis import strategies as st
from planning.estimates import WORTHWHILE, Estimate, choices, recommended

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.model.flops import model_flops
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.host_threads import own_cores
from megatron_zpp.training.members import MEMBERS, Member
from megatron_zpp.training.memory_need import memory_need
from megatron_zpp.training.plan.clock import StepTime
from megatron_zpp.training.plan_words import COLUMNS
from megatron_zpp.training.run_plan import RunPlan
from megatron_zpp.training.sharding import grid_of

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --make-vocab-size-divisible-by 8"
RUN = [*MODEL.split(), "--quantization-block-size", "32", "--bf16", "--ranks-per-node", "2"]
LARGE = "--num-layers 40 --hidden-size 6144 --num-attention-heads 32 --seq-length 1024 --ranks-per-node 16 --fp16 --checkpoint-activations"


def plan(tmp_path: Path, *options: str, flags: list[str] = RUN) -> dict[str, object]:
    output = tmp_path / "plan.json"
    run_here(*options, "--output", str(output), "--", *flags)
    found: dict[str, object] = json.loads(output.read_text())
    return found


def run_here(*words: str) -> None:
    """Prints the plan in this process."""
    plan_run.run(*plan_run._split(plan_run._parser(), words))


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that one test has planned are known to the next one."""
    monkeypatch.setattr(plan_run, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))


@pytest.fixture
def groups_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plans for other sizes of groups, which take most of the time."""
    monkeypatch.setattr(plan_run, "TENSOR_SIZES", (1,))
    monkeypatch.setattr(plan_run, "CONTEXT_SIZES", (1,))


@pytest.fixture
def one_plan(groups_as_given: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of ZeRO-3, where the statement is about the run."""
    monkeypatch.setattr(plan_run, "MEMBERS", (plan_run.ZERO_3,))


@pytest.mark.usefixtures("groups_as_given")
def test_bytes_and_memory_are_those_of_the_run(tmp_path: Path) -> None:
    found = plan(tmp_path, "--nodes", "3", "--inter-gigabits", "1", "--step-seconds", "0.1", "--device", "cpu")
    members = found["rates"][0]["members"]  # type: ignore[index]
    for stage in range(4):
        expected = inter_node_bytes(Features(stage), Grid.of_nodes(3, 2), microbatches=1, element_bytes=2)
        assert members[f"ZeRO-{stage}"]["inter_node_bytes"] == expected
    config = resolve(parse_flags([*RUN, "--zero-stage", "3"]), 6, 2)
    need = memory_need(config, 104, grid_of(config, 6), is_on_gpu=False)
    assert members["ZeRO-3"]["memory_bytes"] == need.total


@pytest.mark.usefixtures("groups_as_given")
def test_a_slow_link_recommends_the_fewest_bytes_that_fit_and_a_fast_one_the_plainest(tmp_path: Path) -> None:
    options = ["--nodes", "24", "--inter-gigabits", "10", "10000", "--teraflops", "40", "--memory-gigabytes", "32"]
    found = plan(tmp_path, *options, flags=LARGE.split())
    slow, fast = found["rates"]  # type: ignore[misc]
    assert slow["recommended"] == "lean" and fast["recommended"] == "ZeRO-3"
    (less,) = plan(tmp_path, *options[:3], "10", *options[5:-1], "15", flags=LARGE.split())["rates"]  # type: ignore[misc]
    assert less["recommended"] == "ZeRO++" and not less["members"]["lean"]["fits"]
    assert not slow["members"]["ZeRO-2"]["fits"] and slow["members"]["ZeRO-3"]["seconds"] > 2 * slow["members"]["ZeRO++"]["seconds"]


@pytest.mark.usefixtures("groups_as_given")
def test_where_nothing_fits_nothing_is_recommended_and_the_plan_that_needs_least_is_named_and_only_what_the_run_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--nodes", "24", "--inter-gigabits", "10", "--teraflops", "40", "--memory-gigabytes", "1"]
    (rate,) = plan(tmp_path, *options, flags=LARGE.split())["rates"]  # type: ignore[misc]
    assert rate["recommended"] is None
    last = capsys.readouterr().out.replace("\n  ", " ").splitlines()[-1]
    assert re.match(r"Recommended: none of these fits; .* \(\S+\) needs the least, [\d.]+ GiB\. Take more nodes, ", last)
    assert "--checkpoint-activations" not in last and "--micro-batch-size" not in last


@pytest.mark.usefixtures("groups_as_given")
def test_an_optimizer_on_the_host_makes_room_on_the_device_counts_on_the_host_and_leaves_stage_0_as_it_is(tmp_path: Path) -> None:
    options = ["--nodes", "24", "--inter-gigabits", "100", "--teraflops", "40"]
    (plain,) = plan(tmp_path, *options, flags=LARGE.split())["rates"]  # type: ignore[misc]
    flags = [*LARGE.split(), "--cpu-optimizer"]
    (found,) = plan(tmp_path, *options, flags=flags)["rates"]  # type: ignore[misc]
    for name, member in found["members"].items():
        is_stage_0, before = name == "ZeRO-0", plain["members"][name]
        assert before["host_bytes"] == 0 and (member["host_bytes"] > 0) is not is_stage_0
        assert (member["memory_bytes"] < before["memory_bytes"]) is not is_stage_0
        assert (member["seconds"] > before["seconds"]) is not is_stage_0
    most = max(member["host_bytes"] for member in found["members"].values())
    (small,) = plan(tmp_path, *options, "--host-memory-gigabytes", f"{16 * most / 1e9 - 0.01}", flags=flags)["rates"]  # type: ignore[misc]
    assert any(member["fits"] is False for member in small["members"].values()) and small["members"]["ZeRO-0"]["fits"] is None


# ---- islands

ISLANDS = [*RUN, "--quantization-block-size", "256", "--diloco-sync-period", "8", "--train-iters", "200"]


@pytest.mark.usefixtures("groups_as_given")
def test_members_are_planned_on_islands_and_those_that_islands_cannot_have_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--inter-gigabits", "1", "--teraflops", "1"]
    (rate,) = plan(tmp_path, "--nodes", "2", *options, flags=ISLANDS)["rates"]  # type: ignore[misc]
    printed = capsys.readouterr().out.replace("\n  ", " ")
    assert "World: 2 nodes x 2 ranks; 2 islands, joined every 8 iterations" in printed and "| outer |" in printed
    assert "\nLeft out: ZeRO-0: --zero-stage 0 lets each of the 2 ranks of an island update all weights" in printed
    for member in rate["members"].values():
        assert member["inter_node_bytes"] == 0 and member["outer_node_bytes"] == rate["members"]["ZeRO-3"]["outer_node_bytes"] > 0
    plan(tmp_path, "--nodes", "4", *options, "--memory-gigabytes", "0.01", flags=[*ISLANDS, "--diloco-islands", "2"])
    printed = capsys.readouterr().out.replace("\n  ", " ")
    assert "\nLeft out: lean-1, lean-2, lean: --zero-quantized-weight-differences adds differences" in printed
    assert "Take more nodes for each island" in printed and "--optimizer-cpu-offload" not in printed


def test_islands_that_zero_3_cannot_have_are_refused() -> None:
    with pytest.raises(FlagError, match="--diloco-islands 3 does not divide the 2 nodes"):
        run_here("--nodes", "2", "--inter-gigabits", "1", "--teraflops", "1", "--", *ISLANDS, "--diloco-islands", "3")


# ---- the advice

B7 = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --ranks-per-node 8 --bf16 --checkpoint-activations "
    "--normalization RMSNorm --swiglu --ffn-hidden-size 11008"
)
ON_CPU = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --ranks-per-node 2 --bf16"
GPUS = "--nodes 4 --teraflops 150 --memory-gigabytes 80"
CPUS = "--nodes 2 --device cpu --intra-gigabytes 2 --teraflops 0.05 --inter-gigabits"


def rates(tmp_path: Path, options: str, flags: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plan(tmp_path, *options.split(), flags=flags.split())["rates"]  # type: ignore[assignment]
    return found


def slowdown(rate: dict[str, Any]) -> float:
    """The time with the recommended plan as a multiple of the fastest of all that fit."""
    return rate["choices"][0]["seconds"] / min(one["seconds"] for one in rate["tried"] if one["fits"] is not False)


@pytest.mark.usefixtures("groups_as_given")
@pytest.mark.parametrize(
    ("options", "flags"),
    [
        *((f"{GPUS} --inter-gigabits 25", f"{B7} --global-batch-size {batch}") for batch in (32, 512, 1024)),
        (f"{GPUS} --inter-gigabits 100 400", f"{B7} --global-batch-size 256"),
        (f"{GPUS} --inter-gigabits 25 --memory-gigabytes 20", f"{B7} --global-batch-size 512"),
        *((f"{CPUS} 0.01 0.1 1", f"{ON_CPU} --global-batch-size {batch}") for batch in (4, 32)),
        (f"{CPUS} 0.1 10 --inter-milliseconds 50", f"{ON_CPU} --global-batch-size 32"),
    ],
)
def test_no_plan_that_fits_is_more_than_3_percent_faster_than_the_recommended_one(tmp_path: Path, options: str, flags: str) -> None:
    for rate in rates(tmp_path, options, flags):
        assert slowdown(rate) <= WORTHWHILE


def test_groups_that_a_run_has_by_its_flags_give_way_to_faster_ones_and_the_text_says_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_run, "CONTEXT_SIZES", (1,))
    flags = f"{ON_CPU} --global-batch-size 32 --tensor-model-parallel-size 2"
    (rate,) = rates(tmp_path, f"{CPUS} 0.1", flags)
    assert slowdown(rate) <= WORTHWHILE and rate["choices"][0]["tensor_model_parallel_size"] == 1
    given = min(member["seconds"] for member in rate["members"].values())
    assert given > 1.2 * rate["choices"][0]["seconds"]
    text = " ".join(capsys.readouterr().out.split())
    assert "Recommended: --tensor-model-parallel-size 1 --context-parallel-size 1 --zeropp lean" in text
    assert "With --tensor-model-parallel-size 2 --context-parallel-size 1: --zero" in text


def estimate(seconds: float, *features: str, name: str = "", stage: int = 3, fits: bool = True, **numbers: int) -> Estimate:
    """numbers: tensor_ranks, node_bytes and memory."""
    member = Member(name, stage, **{f"has_{feature}": True for feature in features})
    plan = SimpleNamespace(
        member=member,
        memory=SimpleNamespace(total=numbers.get("memory", 0)),
        node_bytes=numbers.get("node_bytes", 0),
        exchanged_node_bytes=0,
        outer_node_bytes=0.0,
        rank_bytes=0,
        config=Config().with_values(tensor_model_parallel_size=numbers.get("tensor_ranks", 1), context_parallel_size=1),
    )
    return Estimate(cast(RunPlan, plan), StepTime(seconds, 1.0, 0.0, 0.0, 0.0), fits)


LEAN = ("differences", "quantized_gradients", "gaussian_gradients")
ESTIMATES = st.builds(
    lambda seconds, features, stage, fits, tensor_ranks, node_bytes, memory: estimate(
        seconds,
        *features,
        name=f"{stage}{features}",
        stage=stage,
        fits=fits,
        tensor_ranks=tensor_ranks,
        node_bytes=node_bytes,
        memory=memory,
    ),
    st.floats(1.0, 1.2),
    st.sampled_from([(), ("quantized_weights",), ("quantized_weights", "secondary_weights"), LEAN]),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.integers(0, 2),
    st.integers(0, 2),
)


@given(st.lists(ESTIMATES))
def test_the_recommended_plan_is_the_simplest_within_3_percent_of_the_fastest_that_fits(estimates: list[Estimate]) -> None:
    fitting = [one for one in estimates if one.may_fit]
    choice = recommended(estimates)
    assert (choice is None) == (not fitting)
    if choice is not None:
        limit = WORTHWHILE * min(one.time.seconds for one in fitting)
        assert choice.may_fit and choice.time.seconds <= limit
        assert not any(one.simplicity < choice.simplicity for one in fitting if one.time.seconds <= limit)


@given(st.lists(ESTIMATES))
def test_the_next_choices_are_other_members_that_fit_and_lean_is_one_of_them_at_most(estimates: list[Estimate]) -> None:
    found = choices(estimates)
    assert found[:1] == [choice for choice in [recommended(estimates)] if choice is not None]
    assert all(choice.may_fit for choice in found) and sum(choice.plan.member.is_lean for choice in found) <= 1
    assert len({choice.plan.member.name for choice in found}) == len(found) <= 3


def test_fewer_features_come_before_fewer_bytes_between_nodes_and_those_before_less_memory() -> None:
    few_bytes, little_memory = estimate(1.0, node_bytes=20, memory=46), estimate(1.0, node_bytes=334, memory=24)
    quantized = estimate(1.0, "quantized_weights", node_bytes=1, memory=1)
    grouped = estimate(1.0, tensor_ranks=2, node_bytes=1, memory=1)
    assert recommended([quantized, grouped, little_memory, few_bytes]) is few_bytes


@pytest.mark.usefixtures("groups_as_given")
def test_over_a_fast_link_zero_1_is_preferred_to_zero_2_which_sends_gradients_of_each_micro_batch(tmp_path: Path) -> None:
    (rate,) = rates(tmp_path, f"{GPUS} --inter-gigabits 400", f"{B7} --global-batch-size 1024")
    assert rate["recommended"] == "ZeRO-1"
    assert rate["members"]["ZeRO-2"]["inter_node_bytes"] > 8 * rate["members"]["ZeRO-1"]["inter_node_bytes"]


@pytest.mark.usefixtures("groups_as_given")
def test_the_next_choices_are_named_with_what_they_cost_beside_the_recommended_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (rate,) = rates(tmp_path, f"{GPUS} --inter-gigabits 25", f"{B7} --global-batch-size 512")
    first, second, third = rate["choices"]
    lines = capsys.readouterr().out.replace("\n  ", " ").splitlines()
    advice = [line for line in lines if "choice: " in line or line.startswith("Recommended: ")]
    assert advice[0].startswith(f"Recommended: {first['flags']} ({first['member']}, ")
    for line, place, choice in zip(advice[1:], ("Second", "Third"), (second, third), strict=True):
        seconds, nbytes = choice["seconds"] - first["seconds"], choice["inter_node_bytes"] - first["inter_node_bytes"]
        assert line.startswith(f"{place} choice: {choice['flags']} ({choice['member']}): {seconds:.3g} s more (")
        assert f", {nbytes / 1e9:.3g} GB more between nodes, " in line
    assert lines[-1].startswith("Lean sends fewer bits per value; compare its loss")


@pytest.mark.usefixtures("groups_as_given")
def test_bytes_into_a_node_include_those_of_ranks_of_other_nodes_that_divide_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--nodes", "2", "--inter-gigabits", "100", "--teraflops", "40")
    (rate,) = cast("Any", plan(tmp_path, *options, flags=[*RUN, "--context-parallel-size", "4"]))["rates"]
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if "node GB" in line)
    zero1 = next(line for line in lines[first:] if line.startswith("| ZeRO-1"))
    found = rate["members"]["ZeRO-1"]
    assert found["context_inter_node_bytes"] > 0
    assert float(zero1.split("|")[2]) == float(f"{(found['inter_node_bytes'] + found['context_inter_node_bytes']) / 1e9:.4g}")
    of_sizes = next(line for line in lines if re.match(r"\| 1 +\|  4 ", line))
    assert float(of_sizes.split("|")[5]) >= found["context_inter_node_bytes"] / 1e9


@pytest.mark.usefixtures("groups_as_given")
def test_of_two_members_that_are_equally_fast_the_one_in_less_memory_is_called_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    run_here("--nodes", "2", "--inter-gigabits", "100", "--teraflops", "400", "--", *RUN, "--ranks-per-node", "4")
    assert "Recommended: --zero-stage 2 (ZeRO-2, the fastest)" in capsys.readouterr().out.splitlines()


# ---- what is printed


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("--nodes 1 --teraflops 1", "--ranks-per-node 1"),
        ("--nodes 2 --inter-gigabits 1 --teraflops 1", "--ranks-per-node 4 --tensor-model-parallel-size 2 --context-parallel-size 2"),
        ("--nodes 2 --inter-gigabits 1e-6 --teraflops 1e9 --memory-gigabytes 1e-9", "--cpu-optimizer --save x --async-save"),
        ("--nodes 2 --inter-gigabits 1e-6 --teraflops 1e9 --host-memory-gigabytes 1e-9", "--cpu-optimizer --device-peak-tflops 989.4"),
        ("--nodes 2 --inter-gigabits 1 --step-seconds 1e6 --device cpu", "--save x --async-save --global-batch-size 64"),
        ("--nodes 16 --inter-gigabits 1 --teraflops 1e-6", "--hidden-size 65536 --num-attention-heads 128 --ranks-per-node 8"),
    ],
)
def test_no_line_is_wider_than_a_terminal(
    options: str, flags: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_run, "TENSOR_SIZES", (8,))
    monkeypatch.setattr(plan_run, "CONTEXT_SIZES", (1, 16))
    run_here(*options.split(), "--", *RUN, *flags.split())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    tables = [[len(line) for line in group] for is_table, group in groupby(lines, lambda line: line.startswith("|")) if is_table]
    assert len(tables) >= 2 and all(len(set(widths)) == 1 for widths in tables)  # no row is wrapped


@pytest.mark.usefixtures("groups_as_given")
def test_speed_is_that_of_the_whole_job_and_of_one_rank_and_mfu_is_of_the_given_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--nodes", "1", "--step-seconds", "2"]
    (rate,) = plan(tmp_path, *options, flags=[*RUN, "--global-batch-size", "64"])["rates"]  # type: ignore[misc]
    assert rate["members"]["ZeRO-0"]["tokens_per_second"] == pytest.approx(64 * 16 / 2, rel=1e-2)
    assert "MFU" not in capsys.readouterr().out
    operations = model_flops(parse_flags(RUN).with_values(ffn_hidden_size=128, kv_channels=8, num_query_groups=4).model, 104, 64)
    run_here(*options, "--", *RUN, "--global-batch-size", "64", "--device-peak-tflops", f"{operations / 1e12}")
    printed = capsys.readouterr().out
    (row,) = re.findall(r"^\| ZeRO-0 \|.*computation \|$", printed, re.MULTILINE)
    seconds, speed, of_rank, mfu = [cell.strip() for cell in row.split("|")][5:9]
    assert float(of_rank) == pytest.approx(float(speed) / 2, rel=1e-3)
    assert float(mfu.rstrip("%")) == pytest.approx(100 / 2 / float(seconds), rel=1e-2)
    assert "MFU: of " in printed and "TFLOP/s (--device-peak-tflops)" in " ".join(printed.split())


@pytest.mark.usefixtures("one_plan")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--vocab-size 100 --bf16", "vocabulary of 100 (--vocab-size) padded to 104, weights in bf16"),
        ("--vocab-size 104 --fp16", "vocabulary of 104 (--vocab-size), weights in fp16"),
        (
            "",
            "vocabulary of 50257 (assumed: no tokenizer and no --vocab-size is given) padded to 50264, weights in fp32, because neither "
            "--bf16 nor --fp16 is given",
        ),
    ],
)
def test_vocabulary_and_precision_are_said_with_where_they_are_from(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODEL.replace("--vocab-size 100", "")
    run_here("--nodes", "1", "--teraflops", "1", "--", *model.split(), "--ranks-per-node", "2", *flags.split())
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("groups_as_given")
def test_the_round_trip_between_nodes_makes_every_member_slower_and_none_of_one_node(tmp_path: Path) -> None:
    near, far = (
        plan(tmp_path, "--nodes", "3", "--inter-gigabits", "10", "--teraflops", "1", "--inter-milliseconds", ms)["rates"][0]["members"]  # type: ignore[index]
        for ms in ("0", "100")
    )
    for name, member in near.items():
        assert far[name]["seconds"] > member["seconds"] + 0.1  # two rounds of the gather of numbers
    alone = [plan(tmp_path, "--nodes", "1", "--teraflops", "1", "--inter-milliseconds", ms) for ms in ("0", "100")]
    assert alone[0] == alone[1]


# ---- members and sizes


def test_where_a_flag_contradicts_lean_the_others_are_planned_and_a_line_says_why_whatever_the_processes_that_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--nodes", "3", "--inter-gigabits", "1", "--teraflops", "1", "--", *RUN, "--ranks-per-node", "1")
    finished = run_tool("plan_run", *words)
    assert finished.returncode == 0 and "| ZeRO++ |" in finished.stdout and "| lean" not in finished.stdout
    assert "\nLeft out: lean-1, lean-2, lean: --quantization-block-size 32 does not fit" in finished.stdout
    run_here(*words)
    assert capsys.readouterr().out == finished.stdout


def test_a_table_has_a_line_for_each_pair_of_sizes_that_groups_of_ranks_could_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_run, "COMPARED", [member for member in MEMBERS if member.name == "ZeRO-1"])
    flags = [*RUN, "--ranks-per-node", "8", "--global-batch-size", "32"]
    found = plan(tmp_path, "--nodes", "2", "--inter-gigabits", "1", "--teraflops", "1", flags=flags)
    sizes = {
        (one["tensor_model_parallel_size"], one["context_parallel_size"]): (one["tensor_link_bytes"], one["context_link_bytes"])
        for one in found["rates"][0]["tried"]  # type: ignore[index]
        if one["member"] == "ZeRO-1"
    }
    assert sorted(sizes) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]  # 8 ranks cannot share 4 heads
    assert sizes[1, 1] == (0, 0) and sizes[2, 2] > (0, 0)
    assert 0 == sizes[1, 1][0] < sizes[2, 1][0] < sizes[4, 1][0] and 0 == sizes[1, 1][1] < sizes[1, 2][1]


def test_where_there_is_one_rank_there_is_no_such_table(capsys: pytest.CaptureFixture[str]) -> None:
    run_here("--nodes", "1", "--inter-gigabits", "1", "--teraflops", "1", "--", *RUN, "--ranks-per-node", "1")
    assert "| T " not in capsys.readouterr().out


def test_a_member_without_a_partition_has_no_flag_for_one() -> None:
    flags = [member.flags(1, 1) for member in MEMBERS]
    assert not any("--zero-hpz-partition-size" in words for words in flags)
    assert "--zero-hpz-partition-size 2" in MEMBERS[5].flags(2, 2)


@pytest.mark.usefixtures("one_plan")
@pytest.mark.parametrize("host", [[], ["--host-memory-gigabytes", "1"]])
def test_without_the_memory_of_a_rank_nothing_is_said_to_fit(host: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run_here("--nodes", "2", "--inter-gigabits", "1", "--teraflops", "400", *host, "--", *RUN, "--ranks-per-node", "1")
    out = capsys.readouterr().out
    assert "Whether it fits is not checked without --memory-gigabytes" in out and "that fits" not in out and "| yes |" not in out


@pytest.mark.usefixtures("groups_as_given")
def test_details_of_a_feature_count_where_the_feature_is_on(tmp_path: Path) -> None:
    options = ["--nodes", "2", "--inter-gigabits", "1", "--step-seconds", "0.1"]
    plain, wide = (plan(tmp_path, *options, flags=[*RUN, *more]) for more in ([], ["--zero-quantized-gradients-inter-bits", "8"]))
    plain_members, wide_members = (found["rates"][0]["members"] for found in (plain, wide))  # type: ignore[index]
    assert wide_members["+qgZ"]["inter_node_bytes"] > plain_members["+qgZ"]["inter_node_bytes"]
    assert wide_members["ZeRO-3"] == plain_members["ZeRO-3"]


@pytest.mark.usefixtures("groups_as_given")
def test_the_stage_of_a_deepspeed_file_does_not_make_all_members_one(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}')
    options = ["--nodes", "2", "--inter-gigabits", "1", "--step-seconds", "0.1"]
    plain, with_file = (plan(tmp_path, *options, flags=[*RUN, *more]) for more in ([], ["--deepspeed_config", str(tmp_path / "ds.json")]))
    assert with_file == plain


def test_a_vocabulary_of_files_is_counted(tmp_path: Path) -> None:
    vocab_file, merge_file = write_gpt2_files(tmp_path, 300)
    files = ["--vocab-file", vocab_file, "--merge-file", merge_file]
    for kind in ([], ["--tokenizer-type", "GPT2BPETokenizer"]):
        assert plan_run._vocab_size(parse_flags(["--mock-data", *files, *kind])) == 300
    with pytest.raises(UserError, match="needs --vocab-file"):
        plan_run._vocab_size(parse_flags(["--mock-data", "--tokenizer-type", "GPT2BPETokenizer", "--merge-file", merge_file]))


@pytest.mark.usefixtures("one_plan")
def test_a_plan_with_a_tokenizer_needs_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocab_file, merge_file = write_gpt2_files(tmp_path, 300)
    words = [word for word in RUN if word not in ("--vocab-size", "100")]
    plan(
        tmp_path,
        "--nodes",
        "2",
        "--inter-gigabits",
        "100",
        "--teraflops",
        "40",
        flags=[*words, "--vocab-file", vocab_file, "--merge-file", merge_file],
    )
    assert "vocabulary of 300 (of GPT2BPETokenizer)" in capsys.readouterr().out.replace("\n  ", " ")


@pytest.mark.usefixtures("one_plan")
def test_what_the_run_takes_from_its_checkpoint_the_plan_takes_too(tmp_path: Path) -> None:
    first = resolve(parse_flags([*RUN, "--num-query-groups", "2"]), 2, 2)
    write_manifest(tmp_path / "saved", manifest_of_run(first, 104, iteration=30, consumed_samples=240))
    own = ["--quantization-block-size", "32", "--bf16", "--ranks-per-node", "2"]
    options = ["--nodes", "3", "--inter-gigabits", "1", "--step-seconds", "0.1"]
    taken = plan(tmp_path, *options, flags=[*own, "--load", str(tmp_path / "saved"), "--use-checkpoint-args"])
    assert taken == plan(tmp_path, *options, flags=[*RUN, "--num-query-groups", "2"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--nodes 0 --inter-gigabits 1 --teraflops 1", "0 is not a whole number from 1 to 1048576"),
        ("--nodes 2 --inter-gigabits -1 --teraflops 1", "-1 is not positive"),
        ("--nodes 2 --inter-gigabits 1", "--step-seconds"),
        (
            f"--nodes 2 --inter-gigabits 1 --teraflops 1 -- {MODEL}",
            "--nodes 2 leaves open how many ranks a node has; give --ranks-per-node",
        ),
        ("--nodes 2 --inter-gigabits 1 --teraflops 1 -- --num-layers 2 --ranks-per-node 2", "--hidden-size"),
        ("--nodes 2 --inter-gigabits 1 --teraflops 1 -- --zero-stag 3", "did you mean --zero-stage?"),
    ],
)
def test_mistakes_end_in_one_line_that_says_what_to_do(words: str, expected: str) -> None:
    finished = run_tool("plan_run", *words.split())
    assert finished.returncode == 2
    assert expected in finished.stderr.splitlines()[-1]


@pytest.mark.usefixtures("one_plan")
def test_only_one_node_is_planned_without_the_rate_of_its_link_which_nothing_crosses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone,) = plan(tmp_path, "--nodes", "1", "--teraflops", "1")["rates"]  # type: ignore[misc]
    assert "One node, without a link to others" in capsys.readouterr().out
    (linked,) = plan(tmp_path, "--nodes", "1", "--inter-gigabits", "1", "--teraflops", "1")["rates"]  # type: ignore[misc]
    assert alone == linked | {"inter_gigabits": None}
    with pytest.raises(UserError, match="--inter-gigabits is missing"):
        plan(tmp_path, "--nodes", "2", "--teraflops", "1")


@pytest.mark.parametrize("mistake", [[], ["--zero-stag", "3"], ["--num-attention-heads", "5"]])
def test_torch_is_not_imported_for_help_and_for_mistakes_in_flags(mistake: list[str]) -> None:
    words = ["--nodes", "2", "--inter-gigabits", "1", "--teraflops", "1", "--", *RUN, *mistake] if mistake else ["--help"]
    program = f"""if True:
        import sys
        sys.argv = ["plan_run.py", *{words!r}]
        import plan_run
        try:
            plan_run.main()
        finally:
            print("imported" if "torch" in sys.modules else "left out")"""
    found = run_with_tools("-c", program)
    assert found.returncode == (2 if mistake else 0) and found.stdout.endswith("left out\n")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_processes_that_plan_end_with_a_tool_that_is_killed() -> None:
    words = [sys.executable, "tools/plan_run.py", "--nodes", "2", "--inter-gigabits", "1", "--teraflops", "100", "--", *RUN]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    processes = min(len(own_cores()), plan_run.MOST_PROCESSES)
    wait_until(lambda: len(children_of(process.pid)) == processes, "not every processor plans", pause_seconds=0.01)
    planning = children_of(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, planning)), "a process lives on")
