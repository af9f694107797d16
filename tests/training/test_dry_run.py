"""--dry-run: the plan is that of the run, for any world, and whatever would end the run at its start ends the plan."""

from __future__ import annotations

import re
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from harness.closed_forms import Features, inter_node_bytes
from harness.places import ROOT
from harness.stored_manifest import manifest_of_run, write_manifest
from harness.tiny_corpus import write_corpus

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.counted import in_gib
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config, DataConfig
from megatron_zpp.data.datasets import DataRequest, SampleCounts, build_datasets
from megatron_zpp.model.gpt import GPT
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.dry_run import described_plan, planned_world_size
from megatron_zpp.training.memory_need import memory_need
from megatron_zpp.training.plan_words import COLUMNS
from megatron_zpp.training.sharding import grid_of
from pretrain_zeropp_gpt import main

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --make-vocab-size-divisible-by 8"
RUN = f"--dry-run {MODEL} --quantization-block-size 32 --bf16 --train-iters 7"
ALONE = Launch(0, 1, 0, 1)


def parts_of(flags: str, launch: Launch = ALONE) -> dict[str, str]:
    """The lines of a plan by their names."""
    text = described_plan(parse_flags(f"{RUN} {flags}".split()), launch).split("nothing was started\n")[1]
    lines = re.sub(r"\n {4,}", " ", text).splitlines()  # those that are wrapped
    return dict(re.split(r" \.+ ", line.strip(), maxsplit=1) for line in lines)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_the_plan_are_the_closed_form_and_memory_is_that_of_the_run(stage: int) -> None:
    parts = parts_of(f"--nodes 3 --ranks-per-node 2 --global-batch-size 24 --zero-stage {stage} --distributed-backend gloo")
    expected = inter_node_bytes(Features(stage), Grid.of_nodes(3, 2), microbatches=4, element_bytes=2)
    assert parts["bytes per iteration"].startswith(f"{expected / 1e9:.4g} GB into a node")
    flags = f"{MODEL} --quantization-block-size 32 --bf16 --global-batch-size 24 --zero-stage {stage}"
    config = resolve(parse_flags(flags.split()), 6, 2)
    need = memory_need(config, 104, grid_of(config, 6), is_on_gpu=False)
    assert parts["memory per rank"] == f"{in_gib(need.total)}: {need}"


def test_ranks_that_share_layers_are_in_the_plan_with_the_bytes_of_their_link_and_their_parts() -> None:
    flags = "--zero-stage 3 --nodes 2 --ranks-per-node 4 --global-batch-size 16 --seq-length 4096"
    alone, shared = (parts_of(f"{flags} --tensor-model-parallel-size {size}") for size in (1, 2))
    assert "tensor" not in alone["bytes per iteration"]
    assert re.search(r" GB into a rank inside its node, \S+ GB into a rank over the tensor link, ", shared["bytes per iteration"])
    assert shared["training"].endswith("per rank and iteration 4 x 1 sample") and alone["training"].endswith("2 x 1 sample")
    assert shared["parameters"] == alone["parameters"]
    text = described_plan(parse_flags(f"{RUN} {flags} --tensor-model-parallel-size 2".split()), ALONE)
    assert "plan of 8 ranks as groups of 2 that share layers (2 nodes x 4, GPU)" in text


def test_ranks_that_divide_samples_are_in_the_plan_with_the_bytes_of_their_link() -> None:
    flags = "--zero-stage 3 --nodes 2 --ranks-per-node 2 --global-batch-size 8 --seq-length 4096"
    alone, inside, across = (parts_of(f"{flags} --context-parallel-size {size}") for size in (1, 2, 4))
    assert "context" not in alone["bytes per iteration"]
    assert re.search(r" GB into a rank over the context link, ", inside["bytes per iteration"])
    assert re.search(r" GB into a rank over the context link \(\S+ GB into a node from others\), ", across["bytes per iteration"])
    assert inside["training"].endswith("per rank and iteration 4 x 1 sample, 1/2 of the tokens of each")
    assert inside["operations"] == alone["operations"]
    text = described_plan(parse_flags(f"{RUN} {flags} --context-parallel-size 2 --tensor-model-parallel-size 2".split()), ALONE)
    assert "plan of 4 ranks as groups of 2 that share layers and 2 that divide samples (2 nodes x 2, GPU)" in text


def test_without_a_world_the_plan_is_that_of_the_ranks_that_share_one_sample() -> None:
    assert planned_world_size(parse_flags("--tensor-model-parallel-size 4 --context-parallel-size 2".split()), ALONE) == (8, 8)
    assert planned_world_size(parse_flags("--tensor-model-parallel-size 4".split()), ALONE) == (4, 4)


def test_the_ranks_that_share_one_sample_may_stand_in_a_deepspeed_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"sequence_parallel_size": 2}')
    flags = f"--tensor-model-parallel-size 2 --deepspeed_config {file}"
    text = described_plan(parse_flags(f"{RUN} {flags}".split()), ALONE)
    assert "plan of 4 ranks as groups of 2 that share layers and 2 that divide samples (1 node x 4, GPU)" in text
    with pytest.raises(FlagError, match="--context-parallel-size 4 contradicts sequence_parallel_size 2 in .*; give one of them"):
        described_plan(parse_flags(f"{RUN} {flags} --context-parallel-size 4".split()), ALONE)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--context-parallel-size 3", "choose --context-parallel-size 1, 2 or 4."),
        ("--deepspeed_config ds.json", "choose --context-parallel-size 1, 2 or 4 (--context-parallel-size is sequence_parallel_size 3 in"),
        ("--tensor-model-parallel-size 3", "choose --tensor-model-parallel-size 1, 2 or 4."),
        ("--tensor-model-parallel-size 2 --context-parallel-size 3", "choose --context-parallel-size 1 or 2."),
        ("--context-parallel-size 3 --ranks-per-node 6", "choose --context-parallel-size 1 or 2."),
    ],
)
def test_without_a_world_the_proposed_numbers_of_ranks_need_not_divide_the_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"sequence_parallel_size": 3}')
    with pytest.raises(FlagError, match=re.escape(words)):
        described_plan(parse_flags(f"{RUN} --seq-length 48 {flags}".split()), ALONE)


def test_tokens_parameters_and_micro_batches_are_those_of_the_flags() -> None:
    parts = parts_of("--nodes 2 --ranks-per-node 4 --global-batch-size 64 --micro-batch-size 2")
    assert parts["training"] == "7 iterations of 64 samples of 16 tokens, 7168 tokens in all; per rank and iteration 4 x 2 samples"
    config = resolve(parse_flags(MODEL.split()), 1, 1)
    count = sum(prod(param.whole_shape) for unit in GPT(config.model, 104, 1, torch.float32).unit_specs() for param in unit.params)
    assert parts["parameters"].startswith(f"{count} (")
    assert parts["data"] == "generated tokens" and parts["sharding"] == "ZeRO-0"


def test_an_offloaded_optimizer_is_described_with_the_host_s_parts_per_rank_and_node_and_its_threads() -> None:
    flags = "--nodes 2 --ranks-per-node 2 --global-batch-size 8 --zero-stage 3 --optimizer-cpu-offload"
    parts = parts_of(flags)
    assert parts["sharding"] == "ZeRO-3 + optimizer on the host"
    config = resolve(parse_flags(f"{MODEL} --quantization-block-size 32 --bf16 --zero-stage 3 --cpu-offload".split()), 4, 2)
    need = memory_need(config, 104, grid_of(config, 4), is_on_gpu=True)
    words = f"{in_gib(need.host)}: {need.on_host()}; {in_gib(2 * need.host)} per node; AdamW has the cores of a node divided by 2"
    assert parts["host memory per rank"] == words and need.host > 0
    assert "moves nothing" in parts_of(f"{flags} --distributed-backend gloo")["host memory per rank"]
    assert "host memory per rank" not in parts_of("--zero-stage 3")


def test_inputs_on_the_host_are_described() -> None:
    flags = "--nodes 2 --ranks-per-node 2 --global-batch-size 8 --checkpoint-in-cpu --recompute-granularity full --seq-length 8192"
    assert re.fullmatch(r"(\S+ MiB): inputs of recomputed chunks \1", parts_of(flags)["host memory per rank"])
    on_cpu = parts_of(f"{flags} --distributed-backend gloo")["host memory per rank"]
    assert on_cpu == "the device is the host, so --checkpoint-in-cpu moves nothing"


def test_lean_is_described_by_its_parts_and_each_direction_crosses_between_nodes_once_per_step() -> None:
    flags = "--quantization-block-size 256 --zeropp lean --nodes 2 --ranks-per-node 2 --save unwritten"
    once, several = (parts_of(f"{flags} --global-batch-size {batch}") for batch in (4, 32))
    assert once["sharding"] == "ZeRO-3 + hpZ + weight differences + qgZ in Gaussian codes"
    assert several["sharding"] == f"{once['sharding']} + gradients summed inside partitions"
    crossing = [re.findall(r"weights (\S+), gradients (\S+)\)", parts["bytes per iteration"])[0] for parts in (once, several)]
    assert crossing[0] == crossing[1] and crossing[0][0] == crossing[0][1]
    parameters = int(once["parameters"].split()[0])
    whole = f"{14 * parameters / 1e9:.4g} GB each"  # main weight, two moments, and a copy in bf16
    half = f"{7 * parameters / 1e9:.4g} GB"
    assert once["checkpoint"].startswith(f"{whole}; if one of the nodes has the disk, a save sends {half} between nodes (none with")
    own_disks = parts_of(f"{flags} --global-batch-size 4 --node-local-checkpoints")["checkpoint"]
    assert own_disks == f"{whole}, {half} on the disk of each node; a save sends none of them between nodes"
    copied = parts_of(f"{flags} --global-batch-size 4 --node-local-checkpoints --save-copies 2 --inter-gigabits 0.5 --teraflops 1")[
        "checkpoint"
    ]
    seconds = f"{7 * parameters * 8 / 0.5e9:.4g} s"
    assert (
        copied
        == f"{whole}, {whole.removesuffix(' each')} on the disk of each node with copies; a save sends {half} into each node, in {seconds}"
    )
    timed = parts_of(f"{flags} --global-batch-size 4 --inter-gigabits 0.5 --teraflops 1")["checkpoint"]
    assert f"sends {half} between nodes, in {seconds} (none" in timed


ISLANDS = "--quantization-block-size 256 --zero-stage 3 --nodes 2 --ranks-per-node 2 --global-batch-size 8 --diloco-sync-period 4"


def test_islands_are_described_with_what_crosses_between_them_and_all_ranks_of_the_world() -> None:
    flags = f"{ISLANDS} --save unwritten"
    parts = parts_of(flags)
    assert parts["sharding"] == "ZeRO-3 on 2 islands, joined every 4 iterations"
    assert parts["training"].endswith("per rank and iteration 2 x 1 sample")
    crossing = r"0 GB into a node from others \(weights 0, gradients 0\), outer steps (\S+) GB into a node from other islands on average, "
    average, most = map(float, re.match(rf"{crossing}(\S+) at most, ", parts["bytes per iteration"]).groups())  # type: ignore[union-attr]
    assert 0 < average < most < 4 * average
    means = parts_of(f"{flags} --train-iters 40 --diloco-start-iteration 5")["bytes per iteration"]
    (of_means,) = re.findall(r" at most \((\S+) in each until iteration 5\), ", means)
    assert float(of_means) == pytest.approx(4 * average, rel=1e-3)
    assert ", outer weights, momentum and copies " in parts["memory per rank"]
    parameters = int(parts["parameters"].split()[0])
    whole, half = (f"{nbytes * parameters / 1e9:.4g} GB" for nbytes in (34, 17))  # 4 + 4 + 2, and 12 of each island
    assert parts["checkpoint"].startswith(f"{whole} each; if one of the nodes has the disk, a save sends {half} between nodes")
    assert parts_of(f"{flags} --no-save-optim")["checkpoint"].startswith(f"{4 * parameters / 1e9:.4g} GB each")
    assert parts_of(f"{flags} --node-local-checkpoints")["checkpoint"].startswith(f"{whole} each, {half} on the disk of each node")
    text = described_plan(parse_flags(f"{RUN} {flags}".split()), ALONE)
    assert "plan of 4 ranks (2 nodes x 2, GPU)" in text
    alone = parts_of(flags.partition(" --diloco")[0])
    assert alone["operations"] == parts["operations"] and "outer" not in alone["bytes per iteration"]


def test_time_on_islands_is_that_of_all_ranks_with_the_rate_at_which_they_gain_nothing() -> None:
    model = "--num-layers 8 --hidden-size 256 --seq-length 1024 --global-batch-size 32 --intra-gigabytes 1000"
    flags = f"{ISLANDS} {model} --teraflops 1 --inter-gigabits"
    slow, fast = (parts_of(f"{flags} {rate}")["time"] for rate in (0.01, 100))
    ((seconds, speed, of_rank),) = re.findall(r"^(\S+) s per .* (\S+) tokens per second \((\S+) per rank\)", fast)
    assert float(speed) == pytest.approx(32 * 1024 / float(seconds), rel=2e-3) and float(of_rank) == pytest.approx(
        float(speed) / 4, rel=2e-3
    )
    assert float(slow.split()[0]) > float(seconds)
    found = re.search(r"; from about (\S+) Gbit/s on a run without islands \((.*)\) is as fast, and learns more per token$", fast)
    assert found is not None and found[0] in slow and found[2] in ("--zeropp lean", "--zero-stage 3")
    plain = f"{flags.replace('--diloco-sync-period 4', '').replace('--zero-stage 3', found[2])} {float(found[1])}"
    assert float(parts_of(plain)["time"].split()[0]) == pytest.approx(1.05 * float(seconds), rel=0.05)
    assert "without islands" not in parts_of(f"{flags} 1 --inter-milliseconds 1e5")["time"]  # no rate makes up for so long a way


def test_the_whole_time_on_islands_has_the_iterations_that_take_means() -> None:
    flags = f"{ISLANDS} --teraflops 1 --inter-gigabits 0.01 --train-iters 40"

    def seconds(more: str) -> tuple[float, float, float]:
        """Of an iteration, of one that takes means, and of all."""
        pattern = r"^(\S+) s per iteration(?: \((\S+) s in each until iteration \d+\))?, (\S+) s in all"
        found = re.search(pattern, parts_of(f"{flags} {more}")["time"])
        assert found is not None
        return float(found[1]), float(found[2] or 0), float(found[3])

    of_period, _, all_of_periods = seconds("")
    of_means, _, _ = seconds("--diloco-sync-period 1")  # sends as much in every iteration
    assert of_means > 2 * of_period and all_of_periods == pytest.approx(40 * of_period, rel=1e-3)
    assert seconds("--diloco-start-iteration 5") == pytest.approx((of_period, of_means, 35 * of_period + 5 * of_means), rel=1e-3)
    assert seconds("--diloco-start-iteration 90") == pytest.approx((of_period, of_means, 40 * of_means), rel=1e-3)
    assert seconds("--diloco-start-iteration 5 --diloco-overlap-steps 1")[1] == pytest.approx(of_means, rel=1e-3)


def test_a_run_on_islands_is_told_that_its_link_has_no_rate() -> None:
    assert "without the link between nodes" in parts_of(f"{ISLANDS} --teraflops 10")["time"]


def test_batches_on_islands_are_divided_among_all_ranks() -> None:
    with pytest.raises(FlagError, match="--rampup-batch-size 2 2 4 has batches of 2 samples"):
        parts_of(f"{ISLANDS} --rampup-batch-size 2 2 4 --load empty")


def test_tokens_of_a_batch_that_grows_are_those_of_its_samples() -> None:
    flags = "--rampup-batch-size 4 4 40 --global-batch-size 16"
    iterations, consumed = 0, 0
    while consumed < 100:
        consumed += 16 if consumed > 40 else 4 + 4 * int(consumed / (40 / 3))
        iterations += 1
    by_iterations = parts_of(f"{flags} --train-iters {iterations}")["training"]
    assert f", {16 * consumed} tokens in all" in by_iterations


def test_time_is_the_work_divided_by_the_rate_where_links_are_no_limit() -> None:
    parts = parts_of("--teraflops 1e-6")
    model, _ = re.findall(r"([\d.e-]+) TFLOP per rank|([\d.e-]+) with recomputation", parts["operations"])
    seconds = float(parts["time"].split(" s per iteration")[0])
    assert seconds == pytest.approx(float(model[0]) * 1e12 / 1e6, rel=1e-3)  # four digits are printed
    assert "1e-06 TFLOP/s per rank (model)" in parts["time"]


def test_tokens_per_second_are_those_of_all_ranks_and_of_one_and_mfu_is_of_the_given_peak() -> None:
    flags = "--world-size 2 --nodes 1 --global-batch-size 4 --teraflops 1e-6"
    plain, with_peak = (parts_of(f"{flags} {peak}")["time"] for peak in ("", "--device-peak-tflops 4e-6"))
    ((seconds, speed, of_rank),) = re.findall(r"^(\S+) s per .* (\S+) tokens per second \((\S+) per rank\)", plain)
    assert float(speed) == pytest.approx(4 * 16 / float(seconds), rel=2e-3) and float(of_rank) == pytest.approx(float(speed) / 2, rel=2e-3)
    assert "MFU" not in plain and ", MFU 25.0% of 4e-06 TFLOP/s" in with_peak


def test_the_round_trip_between_nodes_makes_the_plan_slower_by_the_gathers_of_numbers_at_least() -> None:
    flags = "--nodes 3 --ranks-per-node 2 --teraflops 10 --inter-gigabits 100"
    near, far = (parts_of(f"{flags} --inter-milliseconds {milliseconds}")["time"] for milliseconds in (0, 100))
    assert float(far.split()[0]) > float(near.split()[0]) + 0.2 and "latency between nodes" in far


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "vocabulary of 100 (--vocab-size) padded to 104, weights in bf16"),
        ("--tokenizer-type NullTokenizer --vocab-size 104", "vocabulary of 104 (--vocab-size), weights in bf16"),
    ],
)
def test_the_vocabulary_is_said_with_where_its_size_is_from(flags: str, words: str) -> None:
    assert words in parts_of(flags)["parameters"]


def test_a_vocabulary_that_is_assumed_and_weights_in_fp32_are_said() -> None:
    model = MODEL.replace("--vocab-size 100", "")
    text = " ".join(described_plan(parse_flags(f"--dry-run {model}".split()), ALONE).split())
    assert "vocabulary of 50257 (assumed: no tokenizer and no --vocab-size is given) padded to 50264" in text
    assert "weights in fp32, because neither --bf16 nor --fp16 is given" in text


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--nodes 2 --ranks-per-node 4 --tensor-model-parallel-size 2 --context-parallel-size 2 --teraflops 1 --inter-gigabits 1",
        "--zero-stage 3 --cpu-offload --nodes 2 --ranks-per-node 4 --save x --async-save --teraflops 1e9 --inter-gigabits 1e-6",
        "--quantization-block-size 256 --zeropp lean --nodes 2 --ranks-per-node 2 --global-batch-size 32 --distributed-backend gloo",
        "--quantization-block-size 256 --nodes 2 --ranks-per-node 1 --diloco-sync-period 4 --save x --teraflops 1 --inter-gigabits 1",
    ],
)
def test_no_line_is_wider_than_a_terminal(flags: str) -> None:
    text = described_plan(parse_flags(f"{RUN} {flags}".split()), ALONE)
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_a_slow_link_makes_the_plan_slower_and_without_its_rate_the_time_says_so() -> None:
    flags = "--nodes 2 --ranks-per-node 2 --zero-stage 3 --teraflops 10"
    slow, fast = (float(parts_of(f"{flags} --inter-gigabits {rate}")["time"].split(" s per iteration")[0]) for rate in ("0.001", "1000"))
    assert slow > 10 * fast
    assert "without the link between nodes" in parts_of(flags)["time"]
    assert "time" not in parts_of("--nodes 2 --ranks-per-node 2")


@pytest.mark.parametrize(
    "flags, launch, expected",
    [
        ("", ALONE, (1, None)),
        ("--ranks-per-node 4", ALONE, (4, 4)),
        ("--nodes 3 --ranks-per-node 4", ALONE, (12, 4)),
        ("--world-size 12 --ranks-per-node 4", ALONE, (12, 4)),
        ("--world-size 12 --nodes 3", ALONE, (12, 4)),
        ("--world-size 12 --nodes 3 --ranks-per-node 4", ALONE, (12, 4)),
        ("", Launch(1, 6, 1, 3), (6, 3)),
        ("--nodes 2 --ranks-per-node 8", Launch(1, 6, 1, 3), (16, 8)),
    ],
)
def test_the_world_is_that_of_the_flags_else_of_the_launcher(flags: str, launch: Launch, expected: tuple[int, int | None]) -> None:
    assert planned_world_size(parse_flags(flags.split()), launch) == expected


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--nodes 4", "--nodes 4 leaves open.*give --ranks-per-node"),
        ("--world-size 4", "--world-size 4 leaves open.*give --nodes or --ranks-per-node"),
        ("--world-size 4 --nodes 3", "--nodes 3 does not divide --world-size 4"),
        ("--world-size 8 --nodes 2 --ranks-per-node 8", "--nodes 2 times --ranks-per-node 8 is not --world-size 8"),
        ("--world-size 6 --ranks-per-node 4", "--ranks-per-node 4 does not divide the 6 ranks"),
        ("--global-batch-size 3 --world-size 2 --nodes 1", "--global-batch-size 3 is not a multiple of 2"),
        ("--memory-gigabytes 0.0001", "needs .* of memory .* and has .* of GPU memory"),
        ("--zero-stage 2 --cpu-offload --host-memory-gigabytes 0.00001", "needs .* of host memory .main weights .* and has"),
        ("--load nowhere --exit-on-missing-checkpoint", "--load nowhere holds no checkpoint"),
    ],
)
def test_what_no_run_could_have_is_refused(flags: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        parts_of(flags)


def stored_config() -> Config:
    return resolve(parse_flags(f"{RUN} --global-batch-size 2".removeprefix("--dry-run ").split()), 1, 1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run of these flags that has consumed 12 samples."""
    write_manifest(tmp_path / "saved", manifest_of_run(stored_config(), 104))
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--num-layers 3", "holds another model: --num-layers 2 there and 3 here"),
        ("--padded-vocab-size 112", r"embedding.word.weight has shape \(104, 32\) there and \(112, 32\) here"),
        ("--lr 0.5", "was saved with another schedule: --lr .* there and 0.5 here"),
        ("--train-iters 50", r"samples to the end of the decay \(by default that of training\) \d+ there and 100 here"),
    ],
)
def test_what_the_run_would_refuse_of_its_checkpoint_ends_the_plan(saved: Path, flags: str, named: str) -> None:
    two_ranks = f"--load {saved} --world-size 2 --nodes 1 --global-batch-size 2"
    assert parts_of(two_ranks)["start"] == f"from {saved / 'iter_0000003'}"
    with pytest.raises(UserError, match=named):
        parts_of(f"{two_ranks} {flags}")


def test_a_schedule_that_differs_because_the_batch_follows_the_ranks_is_explained(saved: Path) -> None:
    follows = r"\(--global-batch-size is not given, so it follows the number of ranks: 2 there and 4 here\); give the same flags"
    with pytest.raises(UserError, match=follows):
        parts_of(f"--load {saved} --world-size 4 --nodes 1")


@pytest.mark.parametrize(
    "folder, flags, ramp_samples, fits",
    [
        ("saved", "--override-opt-param-scheduler", 8, True),
        ("saved", "--override-opt-param-scheduler", 20, False),
        ("saved", "--finetune", 8, False),
        ("empty", "", 8, False),
    ],
)
def test_batches_are_those_that_come_after_the_start(saved: Path, folder: str, flags: str, ramp_samples: int, fits: bool) -> None:
    """Of 3 samples, which two ranks cannot have, until the ramp's samples are consumed; of 4 from then on."""
    batches = f"--world-size 2 --nodes 1 --rampup-batch-size 3 1 {ramp_samples} --global-batch-size 4"
    flags = f"--load {saved.with_name(folder)} {flags} {batches}"
    if fits:
        assert parts_of(flags)["start"] == f"from {saved / 'iter_0000003'}"
    else:
        with pytest.raises(FlagError, match=f"--rampup-batch-size 3 1 {ramp_samples} has batches of 3 samples"):
            parts_of(flags)


def test_a_damaged_manifest_ends_the_plan_unless_an_older_one_is_good(saved: Path) -> None:
    newer = write_manifest(saved, manifest_of_run(stored_config(), 104, iteration=5))
    (newer / "complete.json").write_text("{}")
    flags = f"--load {saved} --global-batch-size 2"
    with pytest.raises(UserError, match="iter_0000005.*is damaged"):
        parts_of(flags)
    assert parts_of(f"{flags} --load-last-good-checkpoint")["start"] == f"from {saved / 'iter_0000003'}"


def test_flags_of_a_plan_without_a_plan_are_refused() -> None:
    for flags in ("--nodes 2", "--teraflops 3.0", "--device cpu"):
        with pytest.raises(FlagError, match=f"{flags} changes nothing without --dry-run"):
            resolve(parse_flags([*MODEL.split(), *flags.split()]), 1, 1)


def test_corpora_are_opened_and_their_tokens_counted(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[1, 2, 3], [4, 5]])
    flags = f"--tokenizer-type NullTokenizer --data-path {prefix}"
    assert parts_of(flags)["data"] == "1 corpus of 5 tokens; training data: 5 tokens, read 22 times"
    long = write_corpus(tmp_path, [[1] * 1000], name="long")
    assert parts_of(f"--tokenizer-type NullTokenizer --data-path {long}")["data"] == "1 corpus of 1000 tokens"
    with pytest.raises(UserError, match="missing"):
        parts_of(f"{flags}-missing")


def test_a_tokenizer_that_the_checkpoint_names_and_that_is_not_there_is_said_to_be_the_checkpoints(tmp_path: Path) -> None:
    manifest = manifest_of_run(stored_config(), 104)
    manifest.flags["data"].update(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model="gone.model")
    write_manifest(tmp_path / "saved", manifest)
    flags = f"--mock-data --load {tmp_path / 'saved'} --use-checkpoint-args --override-opt-param-scheduler"
    with pytest.raises(UserError, match=r"--tokenizer-model gone\.model .*\(--tokenizer-model is from .*iter_0000003"):
        described_plan(with_checkpoint_args(parse_flags(f"{RUN} {flags}".split())), ALONE)


def test_rules_that_the_run_would_keep_of_its_checkpoint_are_in_the_plan(tmp_path: Path) -> None:
    manifest = manifest_of_run(stored_config(), 104)
    del manifest.flags["data"]["blend_normalization"]
    write_manifest(tmp_path / "saved", manifest)
    prefix = write_corpus(tmp_path, [[1, 2, 3], [4, 5]])
    flags = f"--global-batch-size 2 --tokenizer-type NullTokenizer --data-path 0.6 {prefix} 0.4 {prefix} --load {tmp_path / 'saved'}"
    line = "\nsamples are dealt to corpora as in the checkpoint's run: --blend-normalization once\n"
    assert line in described_plan(parse_flags(f"{RUN} {flags}".split()), ALONE)
    assert line not in described_plan(parse_flags(f"{RUN} {flags} --finetune".split()), ALONE)


def test_a_plan_ends_with_0_and_a_mistake_with_2_and_only_the_first_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in ("1", "0"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        codes = [main(RUN.split()), main(["--help"]), main([*RUN.split(), "--zero-stag", "3"]), main([*RUN.split(), "--nodes", "3"])]
        assert codes == [0, 0, 2, 2]
        printed = capfd.readouterr()
        assert ("plan of 2 ranks (1 node x 2, GPU)" in printed.out, "--zero-stage" in printed.err) == (rank == "0", rank == "0")
    assert "usage: pretrain_zeropp_gpt.py" in printed.out and printed.err.count("error: ") == 2


def test_a_plan_and_the_help_need_no_launcher_that_makes_sense(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}.items():  # a batch script, without srun
        monkeypatch.setenv(name, value)
    assert (main(RUN.split()), main(["--help"]), main(MODEL.split())) == (0, 0, 2)
    printed = capfd.readouterr()
    assert "plan of 1 rank " in printed.out and "usage: " in printed.out and "srun did not start this process" in printed.err


@pytest.mark.parametrize(
    "flags, code",
    [
        ("--help", 0),
        (f"{RUN} --zero-stag 3", 2),
        (f"{RUN} --nodes 4 --ranks-per-node 8 --global-batch-size 3", 2),  # a rule
        (f"{RUN} --global-batch-size 2 --load {{saved}} --num-layers 3", 2),
        (f"{RUN} --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model missing.model", 2),
    ],
)
def test_neither_torch_nor_numpy_is_imported_for_help_and_for_mistakes_in_flags(saved: Path, flags: str, code: int) -> None:
    program = (
        f"import sys, pretrain_zeropp_gpt as entry; code = entry.main({flags.format(saved=saved).split()!r}); "
        "sys.exit(9 if {'torch', 'numpy'} & sys.modules.keys() else code)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, capture_output=True).returncode == code


@pytest.mark.parametrize("split, lengths", [("0,100,0", [20] * 4), ("1,1", [20]), ("1", [0])], ids=str)
def test_a_plan_without_anything_to_train_on_ends_as_the_run_would(tmp_path: Path, split: str, lengths: list[int]) -> None:
    data = DataConfig(data_path=(write_corpus(tmp_path, [[1] * length for length in lengths]),), split=split)
    with pytest.raises(UserError, match="Give training a larger share or more documents") as of_run:
        build_datasets(data, DataRequest(16, 1234, SampleCounts(7, 0, 0), vocab_size=100, eod=99))
    with pytest.raises(UserError, match="is empty") as of_plan:
        parts_of(f"--tokenizer-type NullTokenizer --data-path {data.data_path[0]} --split {split}")
    assert str(of_plan.value) == str(of_run.value)
