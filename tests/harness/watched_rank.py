"""The entry, on a rank that writes down its process id and what it trains on, into the folder WATCHED; a program for soak."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_zpp.training import trainer
from pretrain_zeropp_gpt import main

# One line per sample: the iteration, the sample's number in the run, the CRC-32 of its tokens.
diary = os.open(Path(os.environ["WATCHED"], f"rank_{os.environ['RANK']}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
Path(os.environ["WATCHED"], f"rank_{os.environ['RANK']}.pid").write_text(str(os.getpid()))
forward_backward = trainer.forward_backward


def watched_step(model: Any, engine: Any, batches: Iterator[Any], microbatches: int) -> Any:
    return forward_backward(model, engine, _noted(batches, engine.iteration + 1), microbatches)


def _noted(batches: Iterator[Any], iteration: int) -> Iterator[Any]:
    for batch in batches:
        rows = enumerate(batch.tokens.numpy(), batch.first_sample)
        os.write(diary, "".join(f"{iteration} {sample} {zlib.crc32(row.tobytes())}\n" for sample, row in rows).encode())
        yield batch


trainer.forward_backward = watched_step
sys.exit(main(sys.argv[1:]))
