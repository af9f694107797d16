"""Runs of islands: they go on from a checkpoint as if nothing had happened, and end, skip and fail together."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY, entry, entry_in, losses, pretrain, validation_losses

from megatron_zpp.checkpoint.manifest import read_manifest

SAVED_AT, END, PERIOD = 5, 10, 4
ISLANDS = f"--diloco-sync-period {PERIOD} --quantization-block-size 256"
EXACT = "--diloco-outer-bits 16 --diloco-difference-bits 16"
SMALL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2"
COMMON = f"{SMALL} --train-iters {END} --global-batch-size 8 --micro-batch-size 1"
EVALUATING = f"--eval-iters 1 --eval-interval {SAVED_AT}"
Records = list[dict[str, Any]]


def entry_with_slow_copies(flags: list[str]) -> int:
    """The entry, whose --async-save copies the state so slowly that an evaluation would be under way, if it did not wait."""
    from megatron_zpp.checkpoint.snapshot import HostSnapshot
    from megatron_zpp.training import evaluation

    copy, token_losses = HostSnapshot.copy, evaluation.token_losses

    def slow_copy(snapshot: HostSnapshot) -> None:
        time.sleep(0.2)
        copy(snapshot)

    def slow_losses(*arguments: Any) -> Any:
        time.sleep(0.4)
        return token_losses(*arguments)

    with mock.patch.object(HostSnapshot, "copy", slow_copy), mock.patch.object(evaluation, "token_losses", slow_losses):
        return entry(flags)


def read(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Records]:
    """The checkpoints and records of a run of two islands of two ranks, with dropout, that saves while it evaluates and trains."""
    folder = tmp_path_factory.mktemp("unbroken")
    saving = f"--save {folder / 'saved'} --save-interval {SAVED_AT} --async-save --log-jsonl {folder / 'run.jsonl'}"
    flags = [*TINY, *f"{COMMON} {ISLANDS} {EVALUATING} --zero-stage 3 {saving}".split()]
    assert ranks.run(2, 2, entry_with_slow_copies, flags) == [0, 0, 0, 0]
    return folder / "saved", read(folder / "run.jsonl")


def test_neither_a_save_nor_an_evaluation_changes_a_bit(ranks: RankPool, tmp_path: Path, unbroken: tuple[Path, Records]) -> None:
    _, records = unbroken
    assert losses(pretrain(ranks, 2, 2, f"{COMMON} {ISLANDS} --zero-stage 3", tmp_path / "run.jsonl")) == losses(records)


@pytest.mark.parametrize("stage", ["--zero-stage 3", "--zero-stage 3 --optimizer-cpu-offload", "--zero-stage 2"])
def test_the_next_losses_are_those_of_the_unbroken_run(ranks: RankPool, tmp_path: Path, unbroken: tuple[Path, Records], stage: str) -> None:
    saved, records = unbroken
    flags = f"{COMMON} {ISLANDS} {EVALUATING} {stage} --load {saved} --ckpt-step {SAVED_AT}"
    found = pretrain(ranks, 2, 2, flags, tmp_path / "run.jsonl")
    assert losses(found) == losses(records)[SAVED_AT:]
    assert validation_losses(found) == validation_losses(records)[1:]


def test_exchanges_that_are_late_at_a_save_or_an_evaluation_end_as_without_them(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"{COMMON} {ISLANDS} --diloco-overlap-steps 1 --zero-stage 3"
    saving = f"{EVALUATING} --save {tmp_path / 'saved'} --save-interval {SAVED_AT}"
    records = pretrain(ranks, 2, 2, f"{flags} {saving}", tmp_path / "run.jsonl")
    late = [read_manifest(tmp_path / "saved" / f"iter_{step:07d}").run.get("late_parameters", []) for step in (SAVED_AT, END)]
    assert late[0] and not late[1]
    found = pretrain(ranks, 2, 2, f"{flags} {EVALUATING} --load {tmp_path / 'saved'} --ckpt-step {SAVED_AT}", tmp_path / "resumed.jsonl")
    assert losses(found) == losses(records)[SAVED_AT:] and validation_losses(found) == validation_losses(records)[1:]
    assert losses(pretrain(ranks, 2, 2, flags, tmp_path / "plain.jsonl")) == losses(records)


def entry_on_a_node(folder: str, flags: str, log: str) -> tuple[int, str]:
    node = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return entry_in(folder, [*TINY, *flags.replace("disk", f"disk_{node}").split()], log)


def test_every_node_may_keep_its_island_on_a_disk_of_its_own(ranks: RankPool, tmp_path: Path, unbroken: tuple[Path, Records]) -> None:
    """Also when the nodes come back in another order."""
    _, records = unbroken
    common = f"{COMMON} {ISLANDS} {EVALUATING} --zero-stage 2 --node-local-checkpoints"
    saving = f"{common} --save {tmp_path}/disk --exit-interval {SAVED_AT}"
    assert [code for code, _ in ranks.run(2, 2, entry_on_a_node, str(tmp_path), saving, str(tmp_path / "first.jsonl"))] == [0] * 4
    (tmp_path / "disk_0").rename(tmp_path / "other")
    (tmp_path / "disk_1").rename(tmp_path / "disk_0")
    (tmp_path / "other").rename(tmp_path / "disk_1")
    found = ranks.run(2, 2, entry_on_a_node, str(tmp_path), f"{common} --load {tmp_path}/disk", str(tmp_path / "run.jsonl"))
    assert [code for code, _ in found] == [0] * 4, found[0][1]
    assert "come from the disks of other nodes" in found[0][1]
    assert losses(read(tmp_path / "run.jsonl")) == losses(records)[SAVED_AT:]


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("--zero-stage 2", "the checkpoint has 2 islands; the run goes on from the mean of their weights and moments"),
        (f"--zero-stage 3 {ISLANDS} --diloco-islands 1", "the checkpoint has 2 islands; the one here goes on from the mean"),
        (f"--zero-stage 3 {ISLANDS} --no-load-optim", ""),
    ],
)
def test_a_checkpoint_of_islands_goes_on_in_other_runs(
    ranks: RankPool, tmp_path: Path, unbroken: tuple[Path, Records], flags: str, notice: str
) -> None:
    """From the mean of their weights the loss is near, and it can be saved and loaded again."""
    saved, records = unbroken
    common = f"{COMMON} {flags} --save {tmp_path / 'saved'} --override-opt-param-scheduler"
    logged = str(tmp_path / "run.jsonl")
    found = ranks.run(2, 2, entry_in, str(tmp_path), [*TINY, *f"{common} --load {saved} --ckpt-step {SAVED_AT}".split()], logged)
    assert [code for code, _ in found] == [0] * 4, found[0][1]
    assert (notice or "successfully loaded checkpoint") in found[0][1] and ("checkpoint has 2 islands" in found[0][1]) == bool(notice)
    after = [loss for loss, _ in losses(read(tmp_path / "run.jsonl"))]
    assert after == pytest.approx([loss for loss, _ in losses(records)[SAVED_AT:]], rel=0.02)
    found = ranks.run(2, 2, entry_in, str(tmp_path), [*TINY, *f"{common} --load {tmp_path / 'saved'} --train-iters 12".split()])
    assert [code for code, _ in found] == [0] * 4, found[0][1]


def test_islands_go_on_from_a_checkpoint_of_one_world(ranks: RankPool, tmp_path: Path) -> None:
    """Their first loss is that of the world that goes on as it was. Without moments, its weights are all that is taken."""
    saved = tmp_path / "saved"
    pretrain(ranks, 2, 2, f"{COMMON} --zero-stage 3 --save {saved} --exit-interval {SAVED_AT}", tmp_path / "first.jsonl")
    common = f"{COMMON} --zero-stage 3 --load {saved}"
    expected = losses(pretrain(ranks, 2, 2, common, tmp_path / "plain.jsonl"))
    logged = str(tmp_path / "islands.jsonl")
    found = ranks.run(2, 2, entry_in, str(tmp_path), [*TINY, *f"{common} {ISLANDS}".split()], logged)
    assert [code for code, _ in found] == [0] * 4, found[0][1]
    assert "every island begins with its weights and moments, and without outer momentum" in found[0][1]
    assert "--diloco-sync-period None there and 4 here" in found[0][1] and "--diloco-outer-lr None" not in found[0][1]
    after = losses(read(tmp_path / "islands.jsonl"))
    assert after[0][0] == pytest.approx(expected[0][0], rel=1e-6)
    assert after != expected and len(after) == END - SAVED_AT


def test_what_islands_have_learned_by_themselves_is_in_the_weights_at_the_end(ranks: RankPool, tmp_path: Path) -> None:
    """A period that the run does not reach: without means at the end the outer weights would be the first ones."""
    flags = f"{COMMON} {ISLANDS} {EXACT} {EVALUATING} --zero-stage 3 --diloco-sync-period 100 --diloco-all-at-once"
    flags += " --diloco-start-iteration 0"
    before, after = validation_losses(pretrain(ranks, 2, 2, flags, tmp_path / "run.jsonl"))
    plain = validation_losses(pretrain(ranks, 2, 2, f"{COMMON} {EVALUATING} --zero-stage 3", tmp_path / "plain.jsonl"))
    assert plain[1] < before - 0.01 and after == pytest.approx(plain[1], abs=0.01)


def test_an_exchange_that_is_due_after_an_iteration_that_is_passed_over_is_made(ranks: RankPool, tmp_path: Path) -> None:
    """Only then the outer weights, which are evaluated one iteration later, are not the first ones."""
    common = f"{COMMON} {ISLANDS} {EVALUATING} --zero-stage 3 --diloco-all-at-once --diloco-start-iteration 0 --diloco-outer-lr 1 "
    common += f"--iterations-to-skip {PERIOD}"
    first, _ = validation_losses(pretrain(ranks, 2, 2, f"{common} --diloco-sync-period 100", tmp_path / "never.jsonl"))
    found, _ = validation_losses(pretrain(ranks, 2, 2, common, tmp_path / "run.jsonl"))
    assert found < first


def test_a_resumed_run_may_take_the_warmup_of_its_checkpoint_and_with_it_the_start_of_outer_steps(ranks: RankPool, tmp_path: Path) -> None:
    warmup, saving = "--lr-warmup-iters 6", f"--save {tmp_path / 'saved'} --exit-interval 3"
    common = f"{COMMON} {ISLANDS} --zero-stage 3"
    expected = losses(pretrain(ranks, 2, 2, f"{common} {warmup}", tmp_path / "expected.jsonl"))
    pretrain(ranks, 2, 2, f"{common} {warmup} {saving}", tmp_path / "first.jsonl")
    flags = f"{common} --lr-warmup-iters 0 --load {tmp_path / 'saved'} --use-checkpoint-opt-param-scheduler"
    assert losses(pretrain(ranks, 2, 2, flags, tmp_path / "rest.jsonl")) == expected[3:]


def test_a_checkpoint_without_optimizer_has_the_outer_weights_alone(ranks: RankPool, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    common = f"{COMMON} {ISLANDS} {EVALUATING} --zero-stage 3"
    records = pretrain(ranks, 2, 2, f"{common} --save {saved} --no-save-optim", tmp_path / "run.jsonl")
    manifest = json.loads((saved / f"iter_{END:07d}" / "manifest.json").read_text())
    assert set(manifest["states"]) == {"weight"}
    evaluated = pretrain(ranks, 1, 1, f"{COMMON} {EVALUATING} --skip-train --load {saved}", tmp_path / "evaluated.jsonl")
    # Validation reads the copies that islands share, which a code has brought up to date: near the weights, and not equal.
    assert validation_losses(evaluated)[-1] == pytest.approx(validation_losses(records)[-1], rel=1e-3)


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "flags", "groups"),
    [
        (2, 2, "--tensor-model-parallel-size 2 --sequence-parallel", 1),
        (2, 2, "--context-parallel-size 2", 1),
        (4, 1, "--diloco-islands 2", 2),
    ],
)
def test_ranks_of_an_island_may_share_layers_or_samples_or_stand_on_several_nodes(
    ranks: RankPool, tmp_path: Path, nodes: int, ranks_per_node: int, flags: str, groups: int
) -> None:
    """Within rounding where nothing is quantized: islands of one node with as many groups of samples."""
    common = f"{COMMON} {ISLANDS} {EXACT} --hidden-dropout 0 --attention-dropout 0 --zero-stage 3"
    expected = losses(pretrain(ranks, 2, groups, common, tmp_path / "expected.jsonl"))
    found = losses(pretrain(ranks, nodes, ranks_per_node, f"{common} {flags}", tmp_path / "run.jsonl"))
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=2e-5)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=2e-3)


def test_rows_that_tensor_ranks_share_have_the_same_codes_on_each(ranks: RankPool, tmp_path: Path) -> None:
    """A checkpoint has those of the first holder, so a run with others on the second would go on with other bits."""
    common = f"{COMMON} --hidden-size 32 --num-attention-heads 4 --num-query-groups 1 --tensor-model-parallel-size 2 {ISLANDS} "
    common += f"--zero-stage 3 --save {tmp_path / 'saved'}"
    expected = losses(pretrain(ranks, 2, 2, f"{common} --save-interval {SAVED_AT}", tmp_path / "run.jsonl"))
    found = losses(pretrain(ranks, 2, 2, f"{common} --load {tmp_path / 'saved'} --ckpt-step {SAVED_AT}", tmp_path / "rest.jsonl"))
    assert found == expected[SAVED_AT:]


def entry_with_requests(flags: list[str], rank: int, iteration: int) -> int:
    """The entry, in which this rank is asked to end after its `iteration`-th step."""
    from megatron_zpp.training.stop_conditions import StopConditions, StopRequest

    steps = iter(range(1, 1000))

    def request(_: StopConditions) -> StopRequest:
        return StopRequest.SIGNAL if next(steps) == iteration and int(os.environ["RANK"]) == rank else StopRequest.NONE

    with mock.patch.object(StopConditions, "request", request):
        return entry(flags)


@pytest.mark.parametrize(("rank", "iteration", "ended_at"), [(3, 1, 1), (0, 3, PERIOD), (1, PERIOD + 1, 2 * PERIOD), (2, PERIOD, PERIOD)])
def test_all_islands_end_when_a_period_does_in_which_one_rank_was_asked_to_or_after_a_plain_mean(
    ranks: RankPool, tmp_path: Path, rank: int, iteration: int, ended_at: int
) -> None:
    flags = f"{COMMON} {ISLANDS} --zero-stage 3 --save {tmp_path} --exit-signal-handler"
    assert ranks.run(2, 2, entry_with_requests, [*TINY, *flags.split()], rank, iteration) == [0] * 4
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().split() == [str(ended_at)]


def test_iterations_that_are_passed_over_and_skipped_steps_keep_all_islands_together(ranks: RankPool, tmp_path: Path) -> None:
    """fp16 with a loss scale that is too large at first: every island skips steps by itself, and the learning rate goes on."""
    flags = f"{COMMON} {ISLANDS} --zero-stage 3 --fp16 --initial-loss-scale 16777216 --iterations-to-skip 7"
    records = pretrain(ranks, 2, 2, flags, tmp_path / "run.jsonl")
    plain = pretrain(ranks, 2, 2, f"{COMMON} {ISLANDS} --zero-stage 3 --iterations-to-skip 7", tmp_path / "fp32.jsonl")
    rates: Callable[[Records], dict[int, float]] = lambda found: {record["iteration"]: record["learning_rate"] for record in found}  # noqa: E731
    assert sum(record["skipped_iterations"] for record in records) > 1
    assert {iteration: rate for iteration, rate in rates(records).items() if iteration < 7} == {
        iteration: rate for iteration, rate in rates(plain).items() if iteration < 7
    }
    assert records[-1]["iteration"] == END


def test_timers_are_those_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"{COMMON} {ISLANDS} --zero-stage 3 --log-interval 5 --timing-log-level 1 --timing-log-option all"
    found = ranks.run(2, 2, entry_in, str(tmp_path), [*TINY, *flags.split()])
    assert all(re.search(rf"forward-backward:\n(?:.*\n){{{rank}}} +rank +{rank}: ", found[-1][1]) for rank in range(4)), found[-1][1]


def entry_with_a_bad_island(flags: list[str]) -> int:
    """The entry, in which the losses of the second island are NaN."""
    from megatron_zpp.training import step

    loss_of = step.microbatch_loss
    factor = float("nan") if int(os.environ["RANK"]) >= 2 else 1.0
    with mock.patch.object(step, "microbatch_loss", lambda *arguments: loss_of(*arguments) * factor):
        return entry(flags)


def test_a_report_counts_the_bad_iterations_of_the_worst_island(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"{COMMON} {ISLANDS} --zero-stage 3 --log-interval 3 --log-jsonl {tmp_path / 'run.jsonl'} --train-iters 6"
    assert ranks.run(2, 2, entry_with_a_bad_island, [*TINY, *flags.split()]) == [0] * 4
    for record in read(tmp_path / "run.jsonl"):
        assert (record["skipped_iterations"], record["nan_iterations"]) == (3, 3)
        assert record["lm_loss"] > 0  # of the island that learns
