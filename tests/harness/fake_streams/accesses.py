"""Notes every access of an operation to memory, with its stream, and raises RaceError for two accesses that have no order.

Operations are seen by a dispatch mode, as in torch.cuda._sanitizer: the schema of an operation says which arguments it writes. Memory is
that of torch's caching allocator: a block that is freed may be handed out at once for the next allocation on the stream on which it was
allocated. So every use of a block must happen before the next operation of that stream when the block is freed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.fake_streams.machine import FakeStream, Launch, Machine, asking_file

READS_ON_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select"}
STARTS_NOTHING = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::set_",
    "aten::_unsafe_view",
}  # no kernel
READING_METHODS = ("tolist", "cpu", "numpy")
_of_thread = threading.local()


class RaceError(AssertionError):
    """Two accesses to the same memory have no order. (No Exception of the engine's own kind, so that nothing catches it.)"""


@dataclass
class Use:
    """An access: operation `count` of `stream`. label: the operation's name."""

    stream: int
    count: int
    label: str


@dataclass
class Block:
    """The memory of one storage. reads: the last one of each stream since the last write."""

    allocated_on: FakeStream
    is_on_host: bool = False
    write: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)

    def uses_before(self, *, is_write: bool) -> list[Use]:
        """What an access must come after: the last write, and if it is a write itself, the reads since."""
        return [*filter(None, [self.write]), *(self.reads.values() if is_write else ())]


class Accesses(TorchDispatchMode):
    """Watches the operations of one rank, whose thread enters it.

    blocks: the memory of the whole GPU, by storage; given if ranks share it, which then have to take turns.
    """

    def __init__(self, machine: Machine, blocks: dict[int, Block] | None = None) -> None:
        super().__init__()
        self.machine = machine
        self._blocks: dict[int, Block] = {} if blocks is None else blocks
        self.is_paused = False
        self._sideless: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._literals: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._found_late: RaceError | None = None  # by a finalizer, which cannot raise

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and what torch wraps around each call would take longer than the call."""
        return False

    def __enter__(self) -> Accesses:
        _of_thread.accesses = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _of_thread.accesses = None
        self._raise_late()

    # ---- what the dispatcher calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.is_paused:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        signature = _signature(func)
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for index, name, is_written in signature.arguments:
            value = args[index] if index < len(args) else kwargs.get(name)
            (writes if is_written else reads).extend(_tensors(value))
        outputs = list(_tensors(result)) if signature.makes_memory else []
        if signature.operation == "aten::lift_fresh":
            self._literals.update(tensor.untyped_storage() for tensor in _tensors(args))
        if (not reads and not writes and not outputs) or self._is_of_literals([*reads, *writes], outputs):
            return
        for tensor in writes:
            self._literals.discard(tensor.untyped_storage())
        if signature.operation != "aten::copy_":
            self._take_sides([*reads, *writes], outputs)
        if all(self.machine.is_on_host(tensor) for tensor in (*reads, *writes)) and (reads or writes):
            self._access_by_host(signature.operation, reads, writes)
            for tensor in outputs:
                self.machine.put_on_host(tensor)
            return
        self.access(signature.operation, reads, [*writes, *outputs])
        if signature.operation in READS_ON_HOST or (signature.operation == "aten::copy_" and self._blocks_host(*args, **kwargs)):
            self.machine.read(self.machine.current())

    def _is_of_literals(self, used: list[Tensor], made: list[Tensor]) -> bool:
        """Whether an operation uses literals alone: what torch.tensor makes of numbers, and what is computed from it. The host has them."""
        if not used or any(tensor.untyped_storage() not in self._literals for tensor in used):
            return False
        self._literals.update(tensor.untyped_storage() for tensor in made)
        return True

    def _take_sides(self, used: list[Tensor], made: list[Tensor]) -> None:
        """Puts tensors on the host that are used beside one of the host. Those made from no tensor, or from such ones, may be on either."""
        others = [tensor for tensor in used if not self.machine.is_on_host(tensor)]
        if any(tensor.untyped_storage() not in self._sideless for tensor in others):
            return
        if len(others) == len(used):
            for tensor in made:
                self._sideless.add(tensor.untyped_storage())
            return
        for tensor in others:
            self.machine.put_on_host(tensor)
            self._blocks.pop(tensor.untyped_storage()._cdata, None)

    def _blocks_host(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
        """Whether a copy between host and device returns when it has ended, as CUDA's do unless told otherwise.

        A literal comes from memory of the host that is not pinned: `row[0] = 1.0` copies one, `row[0].fill_(1.0)` does not.
        What torch.tensor() makes on the device is also copied; it cannot be told from a literal here.
        """
        is_from_host = self.machine.is_on_host(source) or source.untyped_storage() in self._literals
        return not non_blocking and self.machine.is_on_host(target) != is_from_host

    # ---- accesses

    def access(self, label: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """One operation of the current stream."""
        self._raise_late()
        if label not in STARTS_NOTHING:
            self.machine.log.append(Launch(asking_file(), label))
        stream = self.machine.current()
        count = stream.advance()
        for tensor in reads:
            block = self._block(tensor, stream)
            self._check(block.uses_before(is_write=False), stream, count, label, "reads")
            block.reads[stream.number] = Use(stream.number, count, label)
        for tensor in writes:
            block = self._block(tensor, stream)
            self._check(block.uses_before(is_write=True), stream, count, label, "writes")
            block.write, block.reads = Use(stream.number, count, label), {}

    def read_by_host(self, label: str, tensor: Tensor) -> None:
        """The host reads the values of a tensor; it waits for the current stream if they are on the device."""
        if tensor.untyped_storage() in self._literals:
            return
        if self.machine.is_on_host(tensor):
            self._access_by_host(label, [tensor], [])
        else:
            self.access(label, [tensor], [])
            self.machine.read(self.machine.current())

    def _access_by_host(self, label: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """An operation of the host on its own memory. It waits for no stream, so what streams have done there must be over."""
        self._raise_late()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                block = self._blocks.get(tensor.untyped_storage()._cdata)
                for use in [] if block is None else block.uses_before(is_write=is_write):
                    if not self.machine.is_seen(use.stream, use.count):
                        name = self.machine.streams[use.stream].name
                        raise RaceError(f"{label} on the host uses what {use.label} in {name} uses, and the host has not waited for it")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Notes nothing inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def _check(self, uses: Iterable[Use], stream: FakeStream, count: int, label: str, verb: str) -> None:
        for use in uses:
            is_same_operation = (use.stream, use.count) == (stream.number, count)
            if not is_same_operation and not self.machine.happens_before(use.stream, use.count, stream):
                names = self.machine.streams
                raise RaceError(f"{label} in {stream.name} {verb} what {use.label} in {names[use.stream].name} uses, without an order")

    # ---- the allocator

    def _block(self, tensor: Tensor, stream: FakeStream) -> Block:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            self._blocks[key] = Block(stream, is_on_host=self.machine.is_on_host(tensor))
            weakref.finalize(storage, self._freed, key).atexit = False
        return self._blocks[key]

    def _freed(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None and not block.is_on_host:  # torch's allocator keeps memory of the host until its copies have ended
            self._check_freed(block)

    def _check_freed(self, block: Block) -> None:
        owner = block.allocated_on
        for use in block.uses_before(is_write=True):
            if not self.machine.happens_before(use.stream, use.count, owner):
                other = self.machine.streams[use.stream].name
                text = f"memory that was allocated on {owner.name} is freed while {use.label} in {other} may still use it"
                self._found_late = self._found_late or RaceError(text)

    def _raise_late(self) -> None:
        if self._found_late is not None:
            raise self._found_late

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The storage gives its memory back, or gets other memory from the current stream."""
        block = self._blocks.get(storage._cdata)
        if block is not None:
            self._check_freed(block)
            block.allocated_on, block.write, block.reads = self.machine.current(), None, {}


@dataclass(frozen=True)
class Signature:
    """What the schema of an operation says. arguments: place and name of those that may be tensors, and whether they are written."""

    operation: str
    arguments: tuple[tuple[int, str, bool], ...]
    makes_memory: bool


@cache  # reading a schema takes longer than most operations
def _signature(func: Any) -> Signature:
    schema = func._schema
    arguments = []
    for index, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        is_viewed = alias is not None and not alias.is_write  # only the description of the memory is read
        if "Tensor" in str(argument.type) and not is_viewed:
            arguments.append((index, argument.name, alias is not None))
    makes_memory = any(output.alias_info is None for output in schema.returns)
    return Signature(schema.name, tuple(arguments), makes_memory)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or a result, which may be a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)


@contextmanager
def watched_memory() -> Iterator[None]:
    """Tells the rank of the calling thread of what no dispatch mode sees: storages that are resized, and values that the host reads."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        accesses: Accesses | None = getattr(_of_thread, "accesses", None)
        if accesses is not None and storage.nbytes() != nbytes:
            accesses.resized(storage)
        return resize(storage, nbytes)

    def reading(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            accesses: Accesses | None = getattr(_of_thread, "accesses", None)
            if accesses is not None and not accesses.is_paused:
                accesses.read_by_host(name, tensor)
            return method(tensor, *args, **kwargs)

        return read

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        for name in READING_METHODS:
            stack.enter_context(patch.object(Tensor, name, reading(name)))
        yield
