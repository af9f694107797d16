"""Two runs never save into one folder: the second ends at start-up and says whose the folder is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from harness.rank_pool import RankFailure, RankPool
from harness.tiny_runs import TINY, entry, losses, pretrain
from test_bad_input import entry_and_errors

from megatron_zpp.checkpoint.run_lock import LOCK_FILE, Job, take_lock


def test_a_second_run_ends_on_every_rank_with_one_sentence_and_touches_nothing(ranks: RankPool, tmp_path: Path) -> None:
    first = take_lock(tmp_path, Job(), print)
    flags = f"--train-iters 2 --zero-stage 3 --save {tmp_path} --load {tmp_path} --log-jsonl {tmp_path / 'second.jsonl'}"
    (code, said), *others = ranks.run(2, 2, entry_and_errors, [flags])
    assert (code, others) == (2, [(2, "")] * 3)
    sentence = (
        rf"pretrain_zeropp_gpt.py: error: --save {tmp_path} is in use by process {os.getpid()} on \S+ \(since .*\); only one run .*\n"
    )
    assert re.fullmatch(sentence, said)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    first.check()
    first.release()


def test_loading_takes_no_lock_and_a_run_gives_its_own_back(ranks: RankPool, tmp_path: Path) -> None:
    flags = "--zero-stage 3 --global-batch-size 8"
    pretrain(ranks, 1, 2, f"{flags} --train-iters 2 --save {tmp_path / 'saved'}", tmp_path / "first.jsonl")
    assert not (tmp_path / "saved" / LOCK_FILE).exists()
    reading = take_lock(tmp_path / "saved", Job(), print)  # of a run that saves there meanwhile
    rest = pretrain(
        ranks, 1, 2, f"{flags} --train-iters 3 --load {tmp_path / 'saved'} --save {tmp_path / 'own'}", tmp_path / "second.jsonl"
    )
    assert len(losses(rest)) == 1
    reading.check()
    reading.release()


def entry_that_loses_its_lock(flags: list[str]) -> int:
    """The entry, whose lock somebody deletes as soon as rank 0 has it."""
    from megatron_zpp.training.save_lock import SaveLock

    take = SaveLock.take

    def take_and_lose(lock: SaveLock, *arguments: object) -> None:
        take(lock, *arguments)
        if lock._held is not None:
            lock._held.path.unlink()

    SaveLock.take = take_and_lose  # type: ignore[method-assign]
    return entry(flags)


def test_a_run_that_has_lost_its_lock_ends_with_an_error_and_saves_nothing(tmp_path: Path) -> None:
    ranks = RankPool()
    with pytest.raises(RankFailure, match="exit code 1"):
        ranks.run(1, 2, entry_that_loses_its_lock, [*TINY, *f"--train-iters 2 --save-interval 1 --save {tmp_path}".split()])
    ranks.close()  # may kill rank 0 while it looks at its lock
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("run.lock.")] == []
