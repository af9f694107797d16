"""Counts the bytes of tensors of a plan that exist at once, by kind, as torch's operators make and free them.

Arithmetic is left for what operators take for themselves and free before they return: see `Workspace`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.training.plan.shapes import result_of

_aten = torch.ops.aten
WIDE_BYTES = 4  # of an fp32 value
PROCESSORS = 148  # of a B200; an H200 has 132, an A100 108
FLASH_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
)

AtCall = Callable[[Any, tuple[Any, ...], Any], None]


@dataclass(frozen=True)
class Workspace:
    """Bytes that an operator of a GPU takes for itself. is_deterministic: attention keeps an order of its sums."""

    is_on_gpu: bool
    is_deterministic: bool = False

    @property
    def device_type(self) -> str:
        return "cuda" if self.is_on_gpu else "cpu"

    def bytes_of(self, operator: Any, args: tuple[Any, ...]) -> int:
        if not self.is_on_gpu:
            return 0
        if operator is _aten.sum.dim_IntList:
            return bias_buffer_bytes(args[0].numel() // args[0].shape[-1], args[0].shape[-1])
        if operator is _aten._softmax_backward_data.default:
            return int(args[0].nbytes)  # a product of gradient and output
        if operator in FLASH_BACKWARD:
            return self._query_sums(args[1])
        return 0

    def _query_sums(self, query_BNSD: Tensor) -> int:
        """The fp32 sums of the queries' gradients."""
        samples, heads = query_BNSD.shape[:2]
        sums = -(-PROCESSORS // (samples * heads)) if self.is_deterministic else 1
        return sums * WIDE_BYTES * query_BNSD.numel()


def bias_buffer_bytes(tokens: int, width: int) -> int:
    """The most bytes that torch takes on a GPU to sum [tokens, width] gradients over tokens (ATen/native/cuda/Reduce.cuh).

    A block of 128 threads sums 128 columns, in fp32 in each of its 32 x 4 accumulators. There are up to 16 blocks for every multiprocessor,
    but no more than tokens / 64 for the same columns.
    """
    bytes_per_column = WIDE_BYTES * 128
    return min(bytes_per_column * (PROCESSORS * 16 * 128 + width), bytes_per_column * width * tokens // 64)


@dataclass(frozen=True)
class _Place:
    """Where the bytes of a storage are counted."""

    nbytes: int
    kind: str
    is_on_host: bool


class LiveMemory(TorchDispatchMode):
    """The bytes of storages that were made inside the block and still exist, on the device and on its host.

    by_kind, on_host: those of now; `resizable` ones are not among them. A tensor has the kind of the block `of_kind` in which it is made.
    at_peak: called with the bytes of a workspace whenever there may be more bytes than ever. at_call: called after every operator.
    """

    def __init__(self, workspace: Workspace, at_peak: Callable[[int], None], at_call: AtCall | None = None) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()
        self.on_host: Counter[str] = Counter()
        self.total = 0
        self.total_on_host = 0
        self._workspace = workspace
        self._at_peak = at_peak
        self._at_call = at_call
        self.kind: str | None = None
        self._makes_host_memory = False
        self._places: dict[int, _Place] = {}
        self._resizable: dict[str, list[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and what torch wraps around each call would take longer than the call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if _is_view(func):  # most are, and they cost nothing
            return func(*args, **(kwargs or {}))
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        result = result_of(func, args, kwargs or {})
        if _makes_memory(func) and self.kind is not None:
            is_on_host = self._makes_host_memory or (self.total_on_host > 0 and any(map(self.is_on_host, _tensors(args))))
            for tensor in _tensors((result,)):
                self._know(tensor, is_on_host)
            self._at_peak(self._workspace.bytes_of(func, args))
        if self._at_call is not None:
            self._at_call(func, args, result)
        return result

    @contextmanager
    def of_kind(self, kind: str | None, *, on_host: bool = False) -> Iterator[None]:
        """What is made inside the block has this kind; None: it is not counted. on_host: it is memory of the host."""
        before = self.kind, self._makes_host_memory
        self.kind, self._makes_host_memory = kind, on_host
        try:
            yield
        finally:
            self.kind, self._makes_host_memory = before

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Gives another kind to tensors that exist."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            place = self._places.get(key)
            if place is not None:
                self._count(place, -1)
                self._places[key] = place = _Place(place.nbytes, kind, place.is_on_host)
                self._count(place, 1)

    def resizable(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Counts these tensors by the sizes that their storages have from time to time: an operator does not show when they change."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            place = self._places.pop(storage._cdata, None)
            if place is not None:
                self._count(place, -1)
            self._resizable.setdefault(kind, []).append(storage)

    def now(self) -> Counter[str]:
        """The bytes on the device by kind, with those of resizable storages."""
        found = self.by_kind.copy()
        for kind, storages in self._resizable.items():
            found[kind] += sum(storage.nbytes() for storage in storages)
        return found

    def bytes_of(self, tensors: Iterable[Tensor]) -> tuple[Counter[str], Counter[str]]:
        """The bytes of these tensors by kind, on the device and on its host. A storage that several of them share counts once."""
        on_device, on_host = Counter[str](), Counter[str]()
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        resizable = {storage._cdata: kind for kind, others in self._resizable.items() for storage in others}
        for key, storage in storages.items():
            place = self._places.get(key)
            if key in resizable:
                on_device[resizable[key]] += storage.nbytes()
            elif place is not None:
                (on_host if place.is_on_host else on_device)[place.kind] += place.nbytes
        return on_device, on_host

    @property
    def resized_total(self) -> int:
        return sum(storage.nbytes() for storages in self._resizable.values() for storage in storages)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether the tensor is in memory of the host."""
        place = self._places.get(tensor.untyped_storage()._cdata)
        return place is not None and place.is_on_host

    def _know(self, tensor: Tensor, is_on_host: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._places or not tensor.is_meta:
            return
        self._places[key] = place = _Place(storage.nbytes(), str(self.kind), is_on_host)
        weakref.finalize(storage, self._freed, key).atexit = False
        self._count(place, 1)

    def _freed(self, key: int) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._count(place, -1)

    def _count(self, place: _Place, sign: int) -> None:
        counter = self.on_host if place.is_on_host else self.by_kind
        counter[place.kind] += sign * place.nbytes
        if place.is_on_host:
            self.total_on_host += sign * place.nbytes
        else:
            self.total += sign * place.nbytes


def most_bytes(run: Callable[[], object], workspace: Workspace) -> int:
    """The most bytes at once of the tensors that `run` makes on the meta device."""
    most = 0

    def note(taken: int) -> None:
        nonlocal most
        most = max(most, live.total + taken)

    live = LiveMemory(workspace, note)
    with live, live.of_kind(""):
        run()
    return most


@cache  # reading a schema takes longer than most operations
def _is_view(func: Any) -> bool:
    """Whether the operator only describes memory of its arguments in another way."""
    returns = func._schema.returns
    return bool(returns) and all(output.alias_info is not None and not output.alias_info.is_write for output in returns)


@cache
def _makes_memory(func: Any) -> bool:
    """Whether an output of the operator is neither an argument nor a view of one."""
    return any(output.alias_info is None for output in func._schema.returns)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
