"""Which checkpoint a run starts from, and what it takes from it, as the flags say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import forked
from harness.places import HARNESS
from harness.rank_pool import RankPool
from harness.tiny_runs import RUN, TINY, losses, pretrain
from test_bad_input import entry_and_output, message_of

from megatron_zpp.checkpoint import durable

FAILING_DISK = HARNESS / "failing_disk.py"
SCHEDULE = "--train-iters 8 --lr 1e-2 --lr-decay-style linear"


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2 and 4 of a run on two ranks; tests that change them take a copy."""
    folder = tmp_path_factory.mktemp("saved")
    pretrain(ranks, 1, 2, f"{SCHEDULE} --zero-stage 1 --save {folder} --save-interval 2 --exit-interval 4", folder / "run.jsonl")
    return folder


def resumed(ranks: RankPool, tmp_path: Path, flags: str) -> list[dict[str, Any]]:
    return pretrain(ranks, 1, 2, f"{SCHEDULE} --zero-stage 1 --exit-interval 6 {flags}", tmp_path / "resumed.jsonl")


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_refused_and_named(ranks: RankPool, tmp_path: Path, saved: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    shard = copy / "iter_0000004" / "rank_00001.safetensors"
    flip_a_byte(shard)
    message = message_of(ranks, 1, 2, f"{SCHEDULE} --load {copy}")
    assert f"{shard} is damaged" in message and "--load-last-good-checkpoint" in message


def test_the_last_good_checkpoint_is_taken_under_its_flag_and_the_damaged_one_named(ranks: RankPool, tmp_path: Path, saved: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    flip_a_byte(copy / "iter_0000004" / "rank_00001.safetensors")
    flags = [*TINY, *SCHEDULE.split(), "--load", str(copy), "--load-last-good-checkpoint", "--exit-interval", "3"]
    (code, output), _ = ranks.run(1, 2, entry_and_output, flags)
    assert code == 0
    assert "WARNING: passed over, because" in output and "iter_0000004/rank_00001.safetensors is damaged" in output
    assert f"successfully loaded checkpoint from {copy / 'iter_0000002'} at iteration 2" in output
    latest = copy / "latest_checkpointed_iteration.txt"
    latest.write_text("")
    (code, again), _ = ranks.run(1, 2, entry_and_output, [*flags, "--use-checkpoint-args"])
    assert code == 0 and f"WARNING: passed over, because {latest} holds '' instead of an iteration" in again
    assert f"successfully loaded checkpoint from {copy / 'iter_0000002'} at iteration 2" in again
    (copy / "iter_0000002" / "complete.json").unlink()
    message = message_of(ranks, 1, 2, f"{SCHEDULE} --load {copy} --load-last-good-checkpoint")
    assert f"no checkpoint in {copy} is good" in message and "iter_0000002" in message and "iter_0000004" in message
    assert message.endswith("; name another folder, or an empty one to start anew\n")  # also a job of the Slurm scripts can do that


def test_ranks_that_see_other_old_checkpoints_try_those_of_rank_0(ranks: RankPool, tmp_path: Path, saved: Path) -> None:
    copies = [Path(shutil.copytree(saved, tmp_path / name)) for name in ("here", "there")]
    for copy in copies:
        (copy / "iter_0000004" / "complete.json").unlink()
    shutil.rmtree(copies[1] / "iter_0000002")
    message = message_of(ranks, 1, 2, *(f"{SCHEDULE} --load {copy} --load-last-good-checkpoint" for copy in copies))
    assert (
        f"no checkpoint in {copies[0]} is good" in message and f"{copies[1] / 'iter_0000002' / 'complete.json'} cannot be read" in message
    )


def test_the_checkpoint_gives_the_shape_that_flags_leave_open(ranks: RankPool, tmp_path: Path, saved: Path) -> None:
    flags = [*RUN.split(), *f"{SCHEDULE} --exit-interval 5 --load {saved} --use-checkpoint-args".split()]
    (code, output), _ = ranks.run(1, 2, entry_and_output, flags)
    assert code == 0 and "--use-checkpoint-args: from" in output and "at iteration 4" in output
    assert "hidden_size ..................................... 32" in output
    message = message_of(ranks, 1, 2, f"{SCHEDULE} --load {saved} --use-checkpoint-args --num-layers 3")
    assert "--num-layers 2 there and 3 here" in message


def test_another_schedule_is_refused_unless_a_flag_says_which_one(ranks: RankPool, tmp_path: Path, saved: Path) -> None:
    other = f"--load {saved} --lr 4e-3 --weight-decay 0.2"
    message = message_of(ranks, 1, 2, f"{SCHEDULE} {other}")
    assert "--lr 0.01 there and 0.004 here; --weight-decay 0.01 there and 0.2 here" in message
    assert "--override-opt-param-scheduler" in message and "--use-checkpoint-opt-param-scheduler" in message
    decays_at_iteration_5 = 1 - 4 / 8
    overridden = resumed(ranks, tmp_path, f"{other} --override-opt_param-scheduler")
    assert overridden[0]["iteration"] == 5 and overridden[0]["learning_rate"] == pytest.approx(4e-3 * decays_at_iteration_5)
    theirs = resumed(ranks, tmp_path, f"{other} --use-checkpoint-opt_param-scheduler --train-iters 16")
    assert theirs[-2:] and theirs[-2]["learning_rate"] == pytest.approx(1e-2 * decays_at_iteration_5)


def test_pretrained_weights_are_taken_only_where_there_is_no_checkpoint_yet(ranks: RankPool, tmp_path: Path, saved: Path) -> None:
    finetuned = resumed(ranks, tmp_path, f"--load {saved} --finetune")
    assert finetuned[0]["iteration"] == 1
    own = tmp_path / "own"
    flags = f"--load {own} --save {own} --pretrained-checkpoint {saved} --exit-interval 2"
    (tmp_path / "resumed.jsonl").unlink()
    first = resumed(ranks, tmp_path, flags)
    assert losses(first) == losses(finetuned)[:2]
    (tmp_path / "resumed.jsonl").unlink()
    second = resumed(ranks, tmp_path, f"{flags} --exit-interval 4")
    assert losses(second) == losses(finetuned)[2:4]
    message = message_of(ranks, 1, 2, f"--train-iters 1 --load {tmp_path / 'none'} --pretrained-checkpoint {tmp_path / 'none'}")
    assert f"--pretrained-checkpoint {tmp_path / 'none'} holds no checkpoint" in message


def test_ranks_that_see_different_checkpoints_are_refused(ranks: RankPool, tmp_path: Path, saved: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    (copy / "latest_checkpointed_iteration.txt").write_text("2")
    message = message_of(ranks, 1, 2, f"{SCHEDULE} --load {saved}", f"{SCHEDULE} --load {copy}")
    assert "iter_0000004 on rank 0 and iter_0000002 on rank 1" in message and "--load must be a folder" in message


def entry_of_impatient_ranks(flags_by_rank: list[str]) -> tuple[int, str]:
    from test_bad_input import entry_and_errors

    patience, durable.VISIBLE_WITHIN_SECONDS = durable.VISIBLE_WITHIN_SECONDS, 0.2
    try:
        return entry_and_errors(flags_by_rank)
    finally:
        durable.VISIBLE_WITHIN_SECONDS = patience


def test_a_save_folder_that_ranks_do_not_share_is_refused_before_training(ranks: RankPool, tmp_path: Path) -> None:
    flags = [f"--train-iters 1 --save {tmp_path / name}" for name in ("here", "there")]
    results = ranks.run(1, 2, entry_of_impatient_ranks, flags)
    assert all(code != 0 for code, _ in results)
    assert f"--save {tmp_path / 'there'} on this rank's machine is not the folder that rank 0 sees" in results[0][1]
    assert not list((tmp_path / "here").iterdir())


def test_a_run_tells_of_every_save_and_ends_when_the_last_one_is_written(ranks: RankPool, tmp_path: Path) -> None:
    flags = [*TINY, *f"--train-iters 4 --save {tmp_path} --save-interval 1 --keep-last 2 --async-save".split()]
    (code, output), _ = ranks.run(1, 2, entry_and_output, flags)
    assert code == 0
    for iteration in range(1, 5):
        assert f"saving checkpoint at iteration {iteration:7d} to {tmp_path}" in output
        assert f"  successfully saved checkpoint at iteration {iteration:7d} to {tmp_path}\nCheckpoint Save GB: 0.00" in output
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000004"]


def test_a_disk_that_fails_in_the_background_ends_the_run_with_another_exit_code_than_0(tmp_path: Path) -> None:
    flags = f"--train-iters 500 --save {tmp_path} --save-interval 2 --exit-interval 300 --async-save".split()
    done = forked.run(FAILING_DISK, *TINY, *flags)
    errors = done.stderr
    assert done.returncode == 1
    assert "CheckpointError" in errors and "iter_0000004.tmp-" in errors and "No space left on device" in errors
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
