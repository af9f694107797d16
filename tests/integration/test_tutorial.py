"""The command of the ZeRO++ tutorial: as printed, and on four CPU ranks with only its sizes reduced."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness.forked import Forked
from harness.places import ROOT
from harness.rank_pool import RankPool, free_port
from harness.tiny_runs import entry_in

from megatron_zpp.monitor.available_memory import CONTROL_GROUP, HOST_MEMORY, available_host_bytes

JSON = ROOT / "scripts" / "ds_zeropp_config.json"
SCRIPT = ROOT / "scripts" / "zeropp_18b.sh"
COMMAND = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers {layers} --hidden-size {hidden}
    --seq-length {tokens} --num-attention-heads {heads} --batch-size 1 --zero-stage 3 --deepspeed_config ds_zeropp_config.json
    --deepspeed-activation-checkpointing --fp16 --checkpoint-activations"""
AS_PRINTED = COMMAND.format(layers=40, hidden=6144, tokens=512, heads=32)
SMALL = COMMAND.format(layers=2, hidden=32, tokens=16, heads=4)

HOST_BYTES = available_host_bytes(HOST_MEMORY, CONTROL_GROUP)
on_a_small_machine = pytest.mark.skipif(HOST_BYTES is None or HOST_BYTES > 250 * 2**30, reason="the tutorial's model may fit here")
NO_WORLD = "no number of such nodes is enough|not even 1024 such nodes are enough"


def write_json(folder: Path, partition_ranks: int = 16) -> None:
    """The tutorial's file, its partition as small as the nodes of a test."""
    content = json.loads(JSON.read_text())
    content["zero_optimization"]["zero_hpz_partition_size"] = partition_ranks
    (folder / JSON.name).write_text(json.dumps(content, indent=4))


def run_alone(folder: Path, flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One process of the entry, started in `folder`."""
    clean = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}}
    return Forked(ROOT / "pretrain_zeropp_gpt.py", *flags.split(), environment={**clean, **environment}, folder=folder).finished()


def test_the_command_with_only_its_sizes_reduced_trains_on_two_nodes_of_two(ranks: RankPool, tmp_path: Path) -> None:
    write_json(tmp_path, partition_ranks=2)
    flags = f"{SMALL} --num-workers 0 --eval-iters 0 --log-interval 5 --exit-interval 10"  # for speed
    results = ranks.run(2, 2, entry_in, str(tmp_path), flags.split(), "log.jsonl")
    assert [code for code, _ in results] == [0] * 4
    printed = results[0][1]
    for line in ("BENCHMARK MODE", "*   --mock-data", "*   --tokenizer-type NullTokenizer", "*   --train-iters 50", "loss-scale 65536.0"):
        assert line in printed
    assert "accepted, has no effect here: --deepspeed-activation-checkpointing" in printed
    assert "not needed here and ignored, because they tune how DeepSpeed works inside: reduce_bucket_size, reduce_scatter" in printed
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert records[-1]["iteration"] == 10
    assert records[-1]["lm_loss"] < records[0]["lm_loss"]
    assert records[-1]["loss_scale"] <= 65536.0


@on_a_small_machine
def test_the_command_as_printed_on_one_process_of_a_small_machine_is_refused_with_figures(tmp_path: Path) -> None:
    (tmp_path / JSON.name).write_text(JSON.read_text())
    done = run_alone(tmp_path, AS_PRINTED, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("pretrain_zeropp_gpt.py: error: the one rank needs 277.7 GiB")
    for part in ("weights 68.7 GiB", "gradients 68.7 GiB", "optimizer state 137.4 GiB", "gathered units 1.7 GiB", "activations "):
        assert part in line
    assert re.search(rf"has \d+\.\d GiB of host memory; (the smallest world that fits is \d+ nodes of 1 rank|{NO_WORLD})", line)
    assert "BENCHMARK MODE" in done.stdout


def test_the_command_as_printed_on_nodes_of_fewer_ranks_is_refused_with_file_key_and_remedy(tmp_path: Path, ranks: RankPool) -> None:
    (tmp_path / JSON.name).write_text(JSON.read_text())
    results = ranks.run(2, 2, entry_in, str(tmp_path), AS_PRINTED.split(), "log.jsonl")
    assert [code for code, _ in results] == [2] * 4
    (text,) = [text for _, text in results if text]
    assert "--zero-hpz-partition-size 16 does not divide the 2 ranks of a node; choose 1 or 2, or start a multiple of 16" in text
    assert "zero_optimization.zero_hpz_partition_size 16 in ds_zeropp_config.json" in text


@on_a_small_machine
def test_four_ranks_that_do_not_fit_are_refused_in_one_sentence(tmp_path: Path, ranks: RankPool) -> None:
    write_json(tmp_path, partition_ranks=2)
    results = ranks.run(2, 2, entry_in, str(tmp_path), AS_PRINTED.split(), "log.jsonl", True)
    assert [code for code, _ in results] == [2] * 4
    lines = [line for _, text in results for line in text.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert "each of the 4 ranks needs" in lines[0] and "copy of weights 8." in lines[0]
    assert re.search(rf"(the smallest world that fits is \d+ nodes of 2 ranks|{NO_WORLD})", lines[0])
    assert "on rank" not in lines[0]


def test_the_environment_and_the_flag_of_the_deepspeed_launcher_make_a_world(tmp_path: Path) -> None:
    write_json(tmp_path, partition_ranks=1)
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common = {name: value for name, value in common.items() if name != "LOCAL_WORLD_SIZE"}
    processes = []
    for rank in range(2):
        flags = [f"--local_rank={rank}", *SMALL.split(), *"--deepspeed --train-iters 2 --num-workers 0 --eval-iters 0".split()]
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
        processes.append(Forked(ROOT / "pretrain_zeropp_gpt.py", *flags, environment=environment, folder=tmp_path))
    done = [process.finished() for process in processes]
    assert [each.returncode for each in done] == [0, 0], done
    printed = [each.stdout for each in done]
    assert "  ranks_per_node .................................. 2\n" in printed[0]
    assert "accepted, has no effect here: --local_rank (the launcher's LOCAL_RANK decides)" in printed[0]


def test_the_script_holds_the_tutorials_command() -> None:
    text = SCRIPT.read_text()
    words = shlex.split(text[text.index("pretrain_zeropp_gpt.py") :].replace("\\\n", " "), comments=True)
    expected = AS_PRINTED.replace(JSON.name, f"scripts/{JSON.name}").split()
    assert words == ["pretrain_zeropp_gpt.py", *expected, "$@"]


def test_the_scripts_json_has_the_tutorials_keys() -> None:
    zero = json.loads(JSON.read_text())
    assert set(zero) == {"zero_optimization"}
    assert {key: value for key, value in zero["zero_optimization"].items() if key.startswith("zero") or key == "stage"} == {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 16,
        "zero_quantized_gradients": True,
    }
    assert {"reduce_bucket_size", "reduce_scatter", "contiguous_gradients", "overlap_comm"} < set(zero["zero_optimization"])


def test_the_script_passes_further_flags_on() -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(SCRIPT), "--help"], env=environment, capture_output=True, text=True, check=True)
    assert "--deepspeed_config" in done.stdout
