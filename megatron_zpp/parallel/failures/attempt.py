"""Ranks that were started together, in a store that may have served an earlier start: torchrun keeps it when it restarts its ranks.

What dead ranks left in such a store, their addresses above all, would be taken for that of living ones. So every start gets a part of the
store for itself, under a name that rank 0 makes up. Others must not take an earlier rank 0's name for it: each makes up a word of its own,
and rank 0 answers the words. An earlier rank's word is answered too, and nobody reads that.

    rank r   greeting/r = WORD           waits for answer/WORD     joined/NAME/r = ""
    rank 0   answer/WORD = NAME          for every r, again where the word has changed, until joined/NAME/r is there
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLL_SECONDS = 0.01


def own_part(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of the store that belongs to this start alone; every rank must call it. No earlier rank may be at work any more.

    Raises RuntimeError, naming who is missed, where a rank does not come in time.
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
