"""A store that counts what is asked of it."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class CountedStore(dist.Store):
    """Passes every operation on to `store`. asked: how many there were, by name. A `get` of torch's groups also waits, which counts too."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.asked: Counter[str] = Counter()

    @property
    def operations(self) -> int:
        return self.asked.total()

    def set(self, key: str, value: str) -> None:
        self.asked["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.asked["get"] += 1
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        self.asked["add"] += 1
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.asked["check"] += 1
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked["multi_get"] += 1
        return self._store.multi_get(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.asked["compare_set"] += 1
        return self._store.compare_set(key, expected, desired)

    def wait(self, *arguments: Any) -> None:
        self.asked["wait"] += 1
        self._store.wait(*arguments)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)
