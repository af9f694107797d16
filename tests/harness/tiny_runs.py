"""Whole runs of the entry as the ranks of a real world, on a model small enough to run hundreds of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

from harness.rank_pool import RankPool

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --make-vocab-size-divisible-by 8"
RUN = "--num-workers 0 --distributed-backend gloo "
RUN += "--quantization-block-size 32 --lr 1e-2 --lr-decay-style constant --log-interval 1 --eval-iters 0"
TINY = f"{MODEL} {RUN}".split()


def entry(flags: list[str], *, plans: bool = False) -> int:
    """The exit code of the entry on this rank. Restores the signals that a run ignores at its end.

    plans: whether the run is planned first, as runs are that a launcher or `forked.py` starts. That takes as long as all else of its start.
    """
    from megatron_zpp.training import startup_checks
    from pretrain_zeropp_gpt import main

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        with contextlib.nullcontext() if plans else mock.patch.object(startup_checks, "check_memory"):
            return main(flags)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def entry_in(folder: str, flags: list[str], log: str = "", plans: bool = False) -> tuple[int, str]:
    """The exit code of the entry on this rank and the text that it printed, with `folder` as working directory.

    log: file of --log-jsonl, if the flags have none. plans: see `entry`.
    """
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            code = entry([*flags, "--log-jsonl", log] if log else flags, plans=plans)
    finally:
        os.chdir(before)
    return code, output.getvalue()


def pretrain(ranks: RankPool, nodes: int, ranks_per_node: int, flags: str, jsonl: Path) -> list[dict[str, Any]]:
    """The objects that a run with TINY and `flags` writes to --log-jsonl; later flags win over earlier ones."""
    codes = ranks.run(nodes, ranks_per_node, entry, [*TINY, *flags.split(), "--log-jsonl", str(jsonl)])
    assert codes == [0] * len(codes)
    return records_of(jsonl)


def records_of(jsonl: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in jsonl.read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Loss and gradient norm of every training iteration, unrounded."""
    return [(record["lm_loss"], record["grad_norm"]) for record in records if "lm_loss" in record]


def validation_losses(records: list[dict[str, Any]]) -> list[float]:
    """Loss of every validation, unrounded."""
    return [record["validation_loss"] for record in records if "validation_loss" in record]
