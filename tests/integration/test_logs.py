"""What a whole run of four ranks tells: lines, points, records and a trace, and that telling changes nothing."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY, entry, losses, pretrain

from megatron_zpp.monitor.profiler import all_threads

TRAINING = "--train-iters 4 --untie-embeddings-and-output-weights --micro-batch-size 2"
NORMS = "--log-params-norm --log-num-zeros-in-grad"
TAGS = ("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm")
VALIDATION_TAGS = ("lm loss validation", "lm loss validation ppl")
TRAFFIC = ("inter_node_bytes", "inter_node_bytes_per_iteration", "intra_node_bytes")
TIMERS = (
    "forward-backward batch-generator forward-compute backward-compute params-all-gather-inter params-all-gather-intra "
    "grads-reduce-scatter-intra grads-reduce-scatter-inter all-grads-sync optimizer optimizer-clip-main-grad optimizer-count-zeros "
    "optimizer-inner-step"
).split()
MEGATRONS_LINE = (
    r"^ iteration\s+(\d+)/\s*(\d+) \| consumed samples:\s+(\d+) \| consumed tokens:\s+(\d+) \| elapsed time per iteration \(ms\): (\S+) "
    r"\| learning rate: (\S+) \| global batch size:\s+(\d+) \| lm loss: (\S+) \| loss scale: (\S+) \| grad norm: (\S+) "
    r"\| num zeros: (\S+) \| params norm: (\S+) \| actual seqlen:\s+(\d+) \| number of skipped iterations:\s+(\d+) "
    r"\| number of nan iterations:\s+(\d+) \| samples per second: (\S+) \| tokens per gpu per second \(tgs\): (\S+) \| TFLOPs: (\S+) \|"
)


@dataclass
class ToldRun:
    """What a run with all instruments on said, on its first and last rank, and where the rest is."""

    first: str
    last: str
    records: list[dict[str, Any]]
    folder: Path


def entry_printing(flags: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = entry(flags)
    return code, output.getvalue()


@pytest.fixture(scope="module")
def told(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> ToldRun:
    folder = tmp_path_factory.mktemp("told")
    flags = f"{TRAINING} {NORMS} --zero-stage 3 --eval-iters 1 --eval-interval 2 --log-interval 2 --log-memory-interval 3 "
    flags += f"--timing-log-level 2 --log-throughput --device-peak-tflops 0.001 --log-jsonl {folder}/log.jsonl "
    flags += f"--tensorboard-dir {folder}/points --log-timers-to-tensorboard --log-memory-to-tensorboard --log-world-size-to-tensorboard "
    flags += f"--log-validation-ppl-to-tensorboard --profile --profile-step-start 1 --profile-step-end 2 --profile-dir {folder}/traces "
    flags += f"--save {folder}/saved --log-progress"
    results = ranks.run(2, 2, entry_printing, [*TINY, *flags.split()])
    assert [code for code, _ in results] == [0] * 4
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return ToldRun(results[0][1], results[3][1], records, folder)


def test_telling_changes_no_bit_and_counts_are_those_of_the_unsharded_run(ranks: RankPool, tmp_path: Path, told: ToldRun) -> None:
    records = pretrain(ranks, 2, 2, f"{TRAINING} {NORMS} --zero-stage 0 --log-interval 2", tmp_path / "log.jsonl")
    theirs = [record for record in told.records if "lm_loss" in record]
    assert losses(records) == losses(theirs)
    assert [record["params_norm"] for record in records] == [record["params_norm"] for record in theirs]
    assert [record["num_zeros"] for record in records] == [record["num_zeros"] for record in theirs]
    assert records[0]["num_zeros"] > 0  # rows of the embedding whose tokens did not occur


def test_lines_are_megatrons_and_say_what_the_records_say(told: ToldRun) -> None:
    lines = [line for line in told.last.splitlines() if line.startswith(" iteration")]
    records = [record for record in told.records if "lm_loss" in record]
    assert len(lines) == len(records) == 2
    for line, record in zip(lines, records, strict=True):
        found = re.match(MEGATRONS_LINE, line)
        assert found is not None
        places = {1: "iteration", 3: "consumed_samples", 8: "lm_loss", 10: "grad_norm", 11: "num_zeros", 12: "params_norm"}
        for place, field in places.items():
            assert float(found[place]) == pytest.approx(record[field], rel=1e-2)
        assert re.search(r"\| throughput per GPU \(TFLOP/s/GPU\): \S+ \| MFU: \S+% \| HFU: \S+% \| ETA: \d\dh \d\dm \d\ds \|$", line)
        assert record["mfu"] == record["model_tflops_per_gpu"] / 0.001 and record["hfu"] == record["tflops_per_gpu"] / 0.001


def test_a_line_says_how_many_evaluations_follow_the_last_iteration(told: ToldRun) -> None:
    lines = [index for index, record in enumerate(told.records) if "lm_loss" in record]
    after = told.records[lines[-1] + 1 :]
    assert [told.records[index]["final_evaluations"] for index in lines] == [len(after)] * len(lines)
    assert ["validation_loss" in record for record in after] == [True, False] and "test_loss" in after[1]


def test_timers_are_printed_and_kept_per_iteration_of_all_ranks(told: ToldRun) -> None:
    header = "(min, max) time across ranks (ms):"
    block = told.last.split(header)[1].splitlines()[1 : 1 + len(TIMERS)]
    assert [line.split()[0] for line in block] == TIMERS
    for record in told.records:
        if "timers_ms" in record:
            assert list(record["timers_ms"]) == TIMERS
            least = {name: shortest for name, (shortest, _) in record["timers_ms"].items()}
            assert 0 < least["forward-compute"] < least["forward-backward"] < record["elapsed_ms_per_iteration"]
    assert re.search(r"save-checkpoint \.+: \(\d+\.\d\d, \d+\.\d\d\)", told.last) and "eval-time ...." in told.last


def test_memory_is_told_after_the_first_line_and_at_its_interval(told: ToldRun) -> None:
    pattern = r"^\[Rank 0\] \(after (\d+) iterations\) memory \(MB\) \| allocated: [\d.]+ \| max allocated: [\d.]+$"
    assert re.findall(pattern, told.first, re.MULTILINE) == ["2", "3"]


def test_progress_names_the_start_and_the_checkpoint(told: ToldRun) -> None:
    lines = (told.folder / "saved" / "progress.txt").read_text().splitlines()
    assert [line.split("# GPUs: 4\t")[1] for line in lines] == ["Starting job", "Saved checkpoint\tIteration: 4"]


def test_event_files_carry_megatrons_tags_and_those_of_losses_and_bytes(told: ToldRun) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(told.folder / "points"))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    expected = {*TAGS, *VALIDATION_TAGS} | {f"{tag} vs samples" for tag in (*TAGS, *VALIDATION_TAGS)}
    expected |= {"iteration-time", "throughput", "mem-allocated-bytes", "mem-max-allocated-bytes"} | {f"{name}-time" for name in TIMERS}
    expected |= {"Loss/training", "Loss/validation"} | {f"Traffic/{key}" for key in TRAFFIC}
    assert tags == expected
    for record in told.records:
        if "lm_loss" in record:
            drawn = {key: {event.step: event.value for event in accumulator.Scalars(f"Traffic/{key}")} for key in TRAFFIC}
            last_step = {key: values[record["iteration"]] for key, values in drawn.items() if key != "inter_node_bytes_per_iteration"}
            assert last_step == {key: record[key] for key in last_step}
    assert [event.step for event in accumulator.Scalars("lm loss")] == [1, 2, 3, 4]
    assert [event.step for event in accumulator.Scalars("lm loss vs samples")] == [8, 16, 24, 32]


def test_the_trace_names_units_hops_and_phases(told: ToldRun) -> None:
    path = told.folder / "traces" / "iterations_2-2_rank_0.pt.trace.json"
    assert f"profile of iterations 2 to 2 on rank 0: {path}" in told.first
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    names = {event["name"] for event in events}
    units = ("embedding", "block.0", "block.1", "final_norm + head")
    assert {f"{verb} {unit}" for verb in ("forward", "backward") for unit in units} <= names
    moves = ("inter-climb to secondary", "intra-climb to full", "intra-descend to secondary", "inter-descend to primary")
    parts = ("encode", "send", "decode", "wait") if all_threads() else ("wait",)  # torch 2.6 profiles the calling thread alone
    assert {f"block.0 {move} {part}" for move in moves for part in parts} <= names
    assert set(TIMERS) <= names
    assert {event["tid"] for event in events if event["name"].startswith(("forward b", "backward b"))} == {"units"}


def test_what_needs_a_gpu_is_refused_on_every_rank_without_one(ranks: RankPool) -> None:
    assert ranks.run(1, 2, entry, [*TINY, "--train-iters", "1", "--nvtx-ranges"]) == [2, 2]
