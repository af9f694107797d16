"""Kills one of the ranks of a run, which are processes; the others must end by themselves within --distributed-timeout-minutes."""

from __future__ import annotations

import tempfile
import time as clock
from pathlib import Path

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.rank_processes import POLL_SECONDS, Ranks, Sharing, free_ports, in_words
from benchmarks.gpu.sharing import working_sharing

ENTRY = "pretrain_zeropp_gpt.py"
RANKS, LOST = 4, 1
TIMEOUT_SECONDS = 60.0  # of --distributed-timeout-minutes 1
FLAGS = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --mock-data --num-workers 0 --bf16 "
    "--train-iters 20000 --micro-batch-size 2 --lr 1e-4 --lr-decay-style constant --log-interval 1 --eval-iters 0 --zero-stage 3 "
    "--ranks-per-node 2 --distributed-timeout-minutes 1"
)


def run(time: Deadline, outcome: Outcome) -> None:
    lose_one(time, outcome, working_sharing(time, outcome, RANKS))


def lose_one(time: Deadline, outcome: Outcome, sharing: Sharing) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jsonl = folder / "run.jsonl"
        environment = {"MASTER_PORT": str(free_ports(1)[0])}
        ranks = Ranks([ENTRY, *FLAGS.split(), "--log-jsonl", str(jsonl)], RANKS, sharing, folder, environment)
        try:
            _lose(time, outcome, ranks, jsonl)
        finally:
            ranks.end()


def _lose(time: Deadline, outcome: Outcome, ranks: Ranks, jsonl: Path) -> None:
    while time.has(TIMEOUT_SECONDS) and not any(ranks.codes()) and not _has_trained(jsonl):
        clock.sleep(POLL_SECONDS)
    if any(ranks.codes()):
        outcome.check("the run trains until a rank is lost", holds=False)
        outcome.say(*in_words(ranks.ended()))
        return
    if not _has_trained(jsonl):
        outcome.ran_late(f"losing a rank: too little is left for the {TIMEOUT_SECONDS:.0f} s that the others may take")
        return
    ranks.kill(LOST)
    limit = Deadline(TIMEOUT_SECONDS)
    while limit.has(POLL_SECONDS) and time.has(POLL_SECONDS) and None in ranks.codes():
        clock.sleep(POLL_SECONDS)
    seconds, codes = TIMEOUT_SECONDS - limit.remaining_seconds(), ranks.codes()
    outcome.measure(exit_codes=codes, seconds_until_all_ended=round(seconds, 1))
    if None in codes and limit.has(POLL_SECONDS):
        outcome.ran_late("the end of the ranks that were left")
        return
    statement = f"after rank {LOST} is killed, the others end within {TIMEOUT_SECONDS:.0f} s (after {seconds:.0f} s: exit codes {codes})"
    outcome.check(statement, holds=None not in codes and 0 not in codes)
    outcome.say(*in_words([end for end in ranks.ended() if end.rank != LOST]))


def _has_trained(jsonl: Path) -> bool:
    return jsonl.is_file() and jsonl.read_text().count('"lm_loss"') >= 3
