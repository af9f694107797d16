"""tools/plan_run.py: the plan takes seconds, does not import torch, and has the memory and bytes of the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import plan_run
import pytest
import torch
from harness.closed_forms import World, inter_node_bytes
from harness.places import ROOT
from harness.stored_manifest import manifest_of_run, write_manifest
from harness.tool import run_tool
from harness.trained_tokenizers import write_gpt2_files
from plan_estimates import Estimate, recommended

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.gpt import GPT
from megatron_zpp.training.memory_need import memory_need
from megatron_zpp.training.run_plan import MEMBERS, Member, RunPlan
from megatron_zpp.training.sharding import grid_of, sharding_of
from megatron_zpp.zero.plan.time_model import StepTime

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


@pytest.fixture
def groups_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plans for other sizes of groups, which take most of the time."""
    monkeypatch.setattr(plan_run, "TENSOR_SIZES", (1,))
    monkeypatch.setattr(plan_run, "CONTEXT_SIZES", (1,))


def test_bytes_and_memory_are_those_of_the_run(tmp_path: Path) -> None:
    found = plan(tmp_path, "--nodes", "3", "--inter-gigabits", "1", "--step-seconds", "0.1", "--device", "cpu")
    members = found["rates"][0]["members"]  # type: ignore[index]
    for stage in range(4):
        expected = inter_node_bytes(World(3, 2), stage, microbatches=1, element_bytes=2)
        assert members[f"ZeRO-{stage}"]["inter_node_bytes"] == expected
    config = resolve(parse_flags([*RUN, "--zero-stage", "3"]), 6, 2)
    model = GPT(config.model, 104, 1, torch.bfloat16)
    need = memory_need(config, model, sharding_of(config), grid_of(config, 6), is_on_gpu=False)
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


def estimate(seconds: float, between_nodes: float, *features: str, memory: int = 0) -> Estimate:
    member = Member("", 3, **{f"has_{feature}": True for feature in features})
    plan = SimpleNamespace(member=member, memory=SimpleNamespace(total=memory))
    return Estimate(cast(RunPlan, plan), 1.0, StepTime(seconds, 1.0, between_nodes, 0.0, 0.0), fits=True)


def test_lean_is_recommended_only_where_the_best_of_the_others_waits_for_other_nodes() -> None:
    lean = estimate(1.0, 0.1, "differences", "gaussian_gradients")
    for between_nodes, expected in ((2.0, True), (0.9, False)):
        others = [estimate(1.4, between_nodes, "quantized_weights"), estimate(3.0, 3.0)]
        assert (recommended([*others, lean]) is lean) == expected
    assert recommended([lean]) is lean and recommended([]) is None


@pytest.mark.usefixtures("groups_as_given")
def test_lean_says_what_it_costs_beside_zeropp(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "24", "--inter-gigabits", "10", "--teraflops", "40", "--memory-gigabytes", "80"]
    run_here(*options, "--", *LARGE.split(), "--global-batch-size", "768")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "Recommended: --zeropp lean (lean, the fastest that fits)"
    assert all(
        word in lines[-1] for word in ("more memory per rank than ZeRO++", "gradients 4.3 GiB instead of", "copy of weights 2.1 GiB")
    )


@pytest.mark.usefixtures("groups_as_given")
def test_a_member_with_as_many_features_as_a_faster_one_is_not_called_simpler(capsys: pytest.CaptureFixture[str]) -> None:
    run_here("--nodes", "2", "--inter-gigabits", "100", "--teraflops", "400", "--", *RUN, "--ranks-per-node", "4")
    assert "Recommended: --zero-stage 2 (ZeRO-2, 0.0% behind ZeRO-1, in less memory)" in capsys.readouterr().out.splitlines()


def test_where_a_flag_contradicts_lean_the_others_are_planned_and_a_line_says_why() -> None:
    finished = run_tool("plan_run", "--nodes", "3", "--inter-gigabits", "1", "--teraflops", "1", "--", *RUN)
    assert finished.returncode == 0 and "| ZeRO++ |" in finished.stdout and "| lean |" not in finished.stdout
    assert finished.stdout.splitlines()[-1].startswith("lean is left out: --quantization-block-size 32 does not fit")


def test_a_table_has_a_line_for_each_pair_of_sizes_that_groups_of_ranks_could_have(tmp_path: Path) -> None:
    flags = [*RUN, "--ranks-per-node", "8", "--global-batch-size", "32"]
    found = plan(tmp_path, "--nodes", "2", "--inter-gigabits", "1", "--teraflops", "1", flags=flags)
    sizes = found["rates"][0]["sizes"]  # type: ignore[index]
    pairs = [(members["tensor_model_parallel_size"], members["context_parallel_size"]) for members in sizes]
    assert pairs == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]  # 8 ranks cannot share 4 heads
    moved = {pair: (members["tensor_link_bytes"], members["context_link_bytes"]) for pair, members in zip(pairs, sizes, strict=True)}
    assert moved[1, 1] == (0, 0) and moved[2, 2] > (0, 0)
    assert 0 == moved[1, 1][0] < moved[2, 1][0] < moved[4, 1][0] and 0 == moved[1, 1][1] < moved[1, 2][1]


def test_where_there_is_one_rank_there_is_no_such_table(tmp_path: Path) -> None:
    found = plan(tmp_path, "--nodes", "1", "--inter-gigabits", "1", "--teraflops", "1", flags=[*RUN, "--ranks-per-node", "1"])
    assert found["rates"][0]["sizes"] == []  # type: ignore[index]


def test_a_member_without_a_partition_has_no_flag_for_one() -> None:
    flags = [member.flags(1, 1) for member in MEMBERS]
    assert not any("--zero-hpz-partition-size" in words for words in flags)
    assert "--zero-hpz-partition-size 2" in MEMBERS[5].flags(2, 2)


@pytest.mark.usefixtures("groups_as_given")
@pytest.mark.parametrize("host", [[], ["--host-memory-gigabytes", "1"]])
def test_without_the_memory_of_a_rank_nothing_is_said_to_fit(host: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run_here("--nodes", "2", "--inter-gigabits", "1", "--teraflops", "400", *host, "--", *RUN, "--ranks-per-node", "1")
    out = capsys.readouterr().out
    assert "Whether it fits is not checked without --memory-gigabytes" in out and "that fits" not in out and "| yes |" not in out


@pytest.mark.usefixtures("groups_as_given")
def test_where_nothing_fits_nothing_is_recommended(tmp_path: Path) -> None:
    options = ["--nodes", "1", "--inter-gigabits", "10", "--teraflops", "40", "--memory-gigabytes", "1"]
    assert plan(tmp_path, *options, flags=LARGE.split())["rates"][0]["recommended"] is None  # type: ignore[index]


def test_details_of_a_feature_count_where_the_feature_is_on(tmp_path: Path) -> None:
    options = ["--nodes", "2", "--inter-gigabits", "1", "--step-seconds", "0.1"]
    plain, wide = (plan(tmp_path, *options, flags=[*RUN, *more]) for more in ([], ["--zero-quantized-gradients-inter-bits", "8"]))
    plain_members, wide_members = (found["rates"][0]["members"] for found in (plain, wide))  # type: ignore[index]
    assert wide_members["+qgZ"]["inter_node_bytes"] > plain_members["+qgZ"]["inter_node_bytes"]
    assert wide_members["ZeRO-3"] == plain_members["ZeRO-3"]


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
    with pytest.raises(ValueError, match="needs --vocab-file"):
        plan_run._vocab_size(parse_flags(["--mock-data", "--tokenizer-type", "GPT2BPETokenizer", "--merge-file", merge_file]))


@pytest.mark.usefixtures("groups_as_given")
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


@pytest.mark.usefixtures("groups_as_given")
def test_only_one_node_is_planned_without_the_rate_of_its_link_which_nothing_crosses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone,) = plan(tmp_path, "--nodes", "1", "--teraflops", "1")["rates"]  # type: ignore[misc]
    assert "One node, without a link to others" in capsys.readouterr().out
    (linked,) = plan(tmp_path, "--nodes", "1", "--inter-gigabits", "1", "--teraflops", "1")["rates"]  # type: ignore[misc]
    assert alone == linked | {"inter_gigabits": None}
    with pytest.raises(ValueError, match="--inter-gigabits is missing"):
        plan(tmp_path, "--nodes", "2", "--teraflops", "1")


def test_torch_is_not_imported() -> None:
    words = ["plan_run.py", "--nodes", "2", "--inter-gigabits", "1", "--teraflops", "1", "--", *RUN]
    program = (
        f"import sys; sys.argv = {words!r}; sys.path.insert(0, 'tools'); import plan_run; plan_run.main(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.usefixtures("groups_as_given")
def test_an_optimizer_on_the_host_makes_room_on_the_device_counts_on_the_host_and_leaves_stage_0_as_it_is(tmp_path: Path) -> None:
    options = ["--nodes", "2", "--inter-gigabits", "100", "--teraflops", "40"]
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
