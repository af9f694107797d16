"""A run that is asked to end saves and leaves at the next step on every rank, and goes on from there as if it had never been asked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness.forked import Forked
from harness.patience import PATIENCE_SECONDS, wait_until
from harness.places import ROOT
from harness.rank_pool import RankFailure, RankPool
from harness.tiny_runs import TINY, entry, losses, pretrain

import pretrain_zeropp_gpt

FLAGS = "--zero-stage 3 --train-iters 5 --global-batch-size 4"
FP16 = "--fp16 --initial-loss-scale 1024 --hysteresis 1"


def entry_with_signal(number: int, iteration: int, flags: list[str]) -> int:
    """The entry, on whose rank 1 the signal arrives in the middle of the step after `iteration`."""
    from megatron_zpp.zero.engine import ZeroEngine

    finish, rank, steps = ZeroEngine.finish_gradients, int(os.environ["RANK"]), 0

    def finish_with_signal(engine: ZeroEngine) -> None:
        nonlocal steps
        steps += 1
        if rank == 1 and steps == iteration + 1:
            os.kill(os.getpid(), number)
        finish(engine)

    ZeroEngine.finish_gradients = finish_with_signal  # type: ignore[method-assign]
    try:
        return entry(flags)
    finally:
        ZeroEngine.finish_gradients = finish  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run logs that is not asked to end."""
    return pretrain(ranks, 1, 2, FLAGS, tmp_path_factory.mktemp("whole") / "log.jsonl")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_one_rank_saves_and_ends_the_run_on_all_and_the_same_command_goes_on(
    ranks: RankPool, tmp_path: Path, whole: list[dict[str, Any]], number: signal.Signals
) -> None:
    command = f"{FLAGS} --exit-signal-handler --save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    flags = [*TINY, *command.split(), "--log-jsonl", str(tmp_path / "parts.jsonl")]
    assert ranks.run(1, 2, entry_with_signal, number, 2, flags) == [0, 0]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "3"
    parts = pretrain(ranks, 1, 2, command, tmp_path / "parts.jsonl")
    assert losses(parts) == losses(whole)


@pytest.mark.parametrize("save_interval", [None, 1], ids=["without a checkpoint", "with one"])
def test_ctrl_c_without_the_handler_is_one_sentence_with_the_iteration_and_the_last_checkpoint(
    tmp_path: Path, save_interval: int | None
) -> None:
    saved = tmp_path / "saved"
    flags = f"--train-iters 100000 --save {saved}".split() + ([] if save_interval is None else ["--save-interval", str(save_interval)])
    run, log = Forked("pretrain_zeropp_gpt.py", *TINY, *flags, "--log-jsonl", tmp_path / "log.jsonl"), tmp_path / "log.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("lm_loss") >= 2, "the run does not get to its second iteration")
    os.kill(run.process.pid, signal.SIGINT)
    done = run.finished(PATIENCE_SECONDS)
    errors = done.stderr
    assert done.returncode == 130, errors
    if save_interval is None:
        kept = f"{saved} has no checkpoint yet "
    else:
        latest = (saved / "latest_checkpointed_iteration.txt").read_text()
        kept = f"the last checkpoint in {saved} is that of iteration {latest}, and the same command with --load {saved} goes on from there "
    sentence = rf"pretrain_zeropp_gpt.py: interrupted after iteration \d+; {re.escape(kept)}\(--exit-signal-handler saves before it ends\)"
    assert re.fullmatch(sentence, errors.splitlines()[-1]) and "Traceback" not in errors


def test_an_error_that_only_speaks_of_an_interrupt_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    world = SimpleNamespace(rank=1, report_failure=lambda text, is_cause: f"rank 1: {text}")
    pretrain_zeropp_gpt.fail(cast("Any", world), OSError("read: interrupted"), cast("Any", SimpleNamespace(release=lambda: None)))
    said = capsys.readouterr().err.splitlines()
    assert said == ["OSError: read: interrupted", "[Rank 1] ended, because rank 1: OSError: read: interrupted"]
    assert codes == [1]


def test_a_run_that_has_lost_its_terminal_saves_whatever_number_of_signals_comes(tmp_path: Path) -> None:
    """Nobody reads the output after the first training line, and signals are sent until the process has ended."""
    flags = f"--train-iters 100000 --exit-signal-handler --save {tmp_path / 'saved'} --log-jsonl /dev/full".split()
    command = [sys.executable, "-u", str(ROOT / "pretrain_zeropp_gpt.py"), *TINY, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        while not run.stdout.readline().startswith(" iteration "):
            pass
        run.stdout.close()
        while run.poll() is None:
            run.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        errors = run.stderr.read()
    assert run.returncode == 0, errors
    assert int((tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text()) > 0
    for output in ("standard output", "--log-jsonl /dev/full"):
        assert errors.count(f"{output} failed") == errors.count(f"{output} is incomplete") == 1, errors


def entry_in_slow_time(seconds_per_look: float, flags: list[str]) -> int:
    """The entry of a process that began at 0, for which `seconds_per_look` pass from one look at the clock to the next."""
    from megatron_zpp.system import process_start
    from megatron_zpp.training import stop_conditions

    clock, began = stop_conditions.time, process_start.MONOTONIC_SECONDS
    looks = iter(range(1, 1_000_000))

    class SlowTime:
        @staticmethod
        def monotonic() -> float:
            return seconds_per_look * next(looks)

    stop_conditions.time, process_start.MONOTONIC_SECONDS = SlowTime, 0.0  # type: ignore[assignment]
    try:
        return entry(flags)
    finally:
        stop_conditions.time, process_start.MONOTONIC_SECONDS = clock, began


def test_a_run_leaves_at_the_first_step_after_its_time(ranks: RankPool, tmp_path: Path) -> None:
    """The process began at 0, and its clock shows 50, 100, 150 seconds after the first steps: two minutes are over after the third."""
    command = f"{FLAGS} --exit-duration-in-mins 2 --save {tmp_path / 'saved'}"
    assert ranks.run(1, 2, entry_in_slow_time, 50.0, [*TINY, *command.split()]) == [0, 0]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "3"


def entry_with_bad_gradients(first: int, flags: list[str]) -> int:
    """The entry, whose loss is NaN on rank 1 from iteration `first` on."""
    from megatron_zpp.zero.engine import ZeroEngine

    backward, rank = ZeroEngine.backward, int(os.environ["RANK"])

    def bad_backward(engine: ZeroEngine, loss: Any, **options: Any) -> None:
        is_bad = rank == 1 and engine.iteration >= first - 1
        backward(engine, loss * float("nan") if is_bad else loss, **options)

    ZeroEngine.backward = bad_backward  # type: ignore[method-assign]
    try:
        return entry(flags)
    finally:
        ZeroEngine.backward = backward  # type: ignore[method-assign]


def test_bad_iterations_in_a_row_end_the_run_with_an_error_and_a_checkpoint_from_before_them(ranks: RankPool, tmp_path: Path) -> None:
    command = f"{FLAGS} {FP16} --max-consecutive-bad-iterations 3 --save {tmp_path / 'saved'} --save-interval 4"
    with pytest.raises(RankFailure, match="exit code 1"):
        RankPool().run(1, 2, entry_with_bad_gradients, 3, [*TINY, *command.split()])
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"
    expected = pretrain(ranks, 1, 2, f"{FLAGS} {FP16}", tmp_path / "whole.jsonl")
    found = pretrain(ranks, 1, 2, f"{FLAGS} {FP16} --load {tmp_path / 'saved'}", tmp_path / "rest.jsonl")
    assert losses(found) == losses(expected)[2:]
    assert found[0]["loss_scale"] == 1024


def test_single_bad_iterations_do_not_end_a_run(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"{FLAGS} --fp16 --initial-loss-scale 1e30 --hysteresis 1 --max-consecutive-bad-iterations 9"
    records = pretrain(ranks, 1, 2, flags, tmp_path / "run.jsonl")
    assert len(losses(records)) == 5 and all(record["skipped_iterations"] == 1 for record in records if "lm_loss" in record)
