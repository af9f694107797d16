"""A tensor link that remembers what the rank asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_zpp.comm.tensor_link import TensorLink

Operation = tuple[str, tuple[int, ...]]


class RecordedLink:
    """Calls `record` with the name of each operation and the shape of what the rank gives, and with "wait" when it waits for one."""

    def __init__(self, link: TensorLink, record: Callable[[Operation], None]) -> None:
        self.ranks, self.rank = link.ranks, link.rank
        self._link = link
        self._record = record

    def __getattr__(self, name: str) -> Any:
        def recorded(values: Tensor) -> Any:
            self._record((name, tuple(values.shape)))
            result = getattr(self._link, name)(values)
            return _RecordedPending(result, self._record) if name.startswith("start_") else result

        return recorded


class _RecordedPending:
    def __init__(self, pending: Any, record: Callable[[Operation], None]) -> None:
        self._pending = pending
        self._record = record

    def wait(self) -> Tensor:
        self._record(("wait", ()))
        result: Tensor = self._pending.wait()
        return result
