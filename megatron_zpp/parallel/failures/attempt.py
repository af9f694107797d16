"""Gives the ranks of one start a part of the store for themselves; torchrun keeps the store when it restarts its ranks.

Entries of dead ranks, above all their addresses, would be mistaken for those of living ranks. So every start uses a part of the store under
a new name, which rank 0 chooses. The other ranks must not read the name of an earlier rank 0. So each of them writes a random word, and
rank 0 writes its answer under that word. It also answers the words of earlier ranks, but no rank reads these answers.

    rank r   greeting/r = WORD           waits for answer/WORD     joined/NAME/r = ""
    rank 0   answer/WORD = NAME          for every r, again if the word has changed, until joined/NAME/r exists
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLL_SECONDS = 0.01


def own_part(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of the store for this start; every rank must call it, after all ranks of earlier starts have ended.

    Raises RuntimeError, naming the missing ranks, if a rank does not join in time.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        _answer_all(store, name, world_size, timeout)
    else:
        name = _ask(store, rank, timeout)
    return dist.PrefixStore(name, store)


def _ask(store: dist.Store, rank: int, timeout: timedelta) -> str:
    word = uuid.uuid4().hex
    store.set(f"greeting/{rank}", word)
    try:
        store.wait([f"answer/{word}"], timeout)
    except RuntimeError as error:
        raise RuntimeError(f"rank {rank} has waited {timeout} for rank 0 to join the run") from error
    name: str = store.get(f"answer/{word}").decode()
    store.set(f"joined/{name}/{rank}", "")
    return name


def _answer_all(store: dist.Store, name: str, world_size: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"greeting/{rank}"]) and (word := store.get(f"greeting/{rank}")) != answered.get(rank):
                store.set(f"answer/{word.decode()}", name)
                answered[rank] = word
        missing = [rank for rank in missing if not store.check([f"joined/{name}/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 has waited {timeout} for rank {', '.join(map(str, missing))} of {world_size} to join the run")
        time.sleep(POLL_SECONDS if missing else 0)
