"""Counts the bytes of tensors that exist at once, as torch's operators make and free them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The bytes of storages that were made inside the block and still exist. peak: the most so far.

    What an operator allocates for itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._know(tensor, 0)  # made before the block
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._know(tensor, tensor.untyped_storage().nbytes())
        return result

    def _know(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._freed, key, nbytes).atexit = False
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
