"""Runs a kernel: all threads of many grid blocks at once, an array of numpy per register.

Threads that branch apart run in turn, those that are furthest behind first, and join where the others wait: so they meet again wherever the
code does. A shuffle needs all 32 lanes of its warp, and a barrier all threads of the grid block that have not ended: otherwise the run ends
with an error, where a GPU would hang or compute with what it finds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testbed.kernels.ptx_machine.arithmetic import DTYPES, Values, operation
from testbed.kernels.ptx_machine.memory import AccessError, GlobalMemory, SharedMemory
from testbed.kernels.ptx_machine.module import Instruction, Kernel

LANES = 32
SECTOR_BYTES = 32  # of global memory, the least that moves
MOST_THREADS = 1 << 14  # at a time
REGISTERS = {"%p": "pred", "%rs": "u16", "%r": "u32", "%rd": "u64", "%f": "f32", "%fd": "f64"}
POISON = 0xA5  # in registers of threads that have not written them
ADDRESS = re.compile(r"\[(?P<base>[^+\]]+)(?:\+(?P<offset>-?\d+))?\]")
EXCHANGED = (31, -1)  # a shuffle's bounds and lanes: of whole warps

Mask = NDArray[np.bool_]
Fetch = Callable[["_Threads"], Values]
Step = Callable[["_Threads", Mask], None]


class MachineError(Exception):
    """The kernel has an instruction that is not known here, or one that not all threads reach that must."""


@dataclass
class Profile:
    """What a kernel did. issued: instructions of warps, by operation; sectors: of global memory, as its warps asked for them."""

    issued: Counter[str] = field(default_factory=Counter)
    touched_bytes: Counter[str] = field(default_factory=Counter)  # of loads and stores
    sectors: Counter[str] = field(default_factory=Counter)

    def access(self, op: str, lanes: NDArray[np.int64], addresses: NDArray[np.int64], nbytes: int) -> None:
        what = op.split(".")[0]
        self.touched_bytes[what] += len(addresses) * nbytes
        first = lanes // LANES << 48
        ends = (addresses // SECTOR_BYTES, (addresses + nbytes - 1) // SECTOR_BYTES)
        self.sectors[what] += len(np.unique(np.concatenate([first + end for end in ends])))


@dataclass
class _Threads:
    """Those that run together."""

    block_threads: int
    grid: tuple[int, int]
    blocks: NDArray[np.int64]  # [blocks]: indices, row by row
    parameters: NDArray[np.uint8]
    memory: GlobalMemory
    shared: SharedMemory
    profile: Profile | None
    registers: dict[str, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count = len(self.blocks) * self.block_threads
        self.lane = np.arange(self.count)
        self.local_block = self.lane // self.block_threads
        columns, rows = self.grid
        block = self.blocks[self.local_block]
        numbers = {
            "%tid.x": self.lane % self.block_threads,
            "%ntid.x": np.full(self.count, self.block_threads),
            "%ctaid.x": block % columns,
            "%ctaid.y": block // columns,
            "%nctaid.x": np.full(self.count, columns),
            "%nctaid.y": np.full(self.count, rows),
        }
        self.registers.update((name, values.astype(np.uint32)) for name, values in numbers.items())

    def set(self, name: str, values: Values, mask: Mask) -> None:
        if values.ndim == 0:
            values = np.full(self.count, values)
        if not mask.all():
            before = self.registers.get(name)
            if before is None:
                before = np.full(self.count * values.itemsize, POISON, np.uint8).view(values.dtype) if values.dtype != bool else ~values
            values = np.where(mask, values, before.view(values.dtype))
        self.registers[name] = values

    def warps_of(self, mask: Mask) -> int:
        return int(mask.reshape(-1, LANES).any(axis=1).sum())


class Program:
    """A kernel whose instructions are made ready when they are first run; most of a kernel's are for cases that a launch does not have."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._steps: dict[int, Step | None] = {}

    def step(self, at: int) -> Step | None:
        if at not in self._steps:
            self._steps[at] = _step(self.kernel, self.kernel.instructions[at])
        return self._steps[at]


def run(
    program: Program,
    grid: tuple[int, int],
    block_threads: int,
    parameters: Sequence[bytes],
    memory: GlobalMemory,
    profile: Profile | None = None,
) -> None:
    """Runs the kernel over a grid of columns and rows. Raises MachineError and AccessError."""
    kernel = program.kernel
    if [len(value) for value in parameters] != [place.nbytes for place in kernel.parameters]:
        raise MachineError(f"{kernel.name} was started with parameters of other sizes than it has")
    packed = np.zeros(max((place.start + place.nbytes for place in kernel.parameters), default=0) + 8, np.uint8)
    for value, place in zip(parameters, kernel.parameters, strict=True):
        packed[place.start : place.start + place.nbytes] = np.frombuffer(value, np.uint8)
    together = max(1, MOST_THREADS // block_threads)
    blocks = grid[0] * grid[1]
    with np.errstate(all="ignore"):
        for first in range(0, blocks, together):
            some = np.arange(first, min(first + together, blocks))
            shared = SharedMemory(len(some), kernel.shared_bytes)
            _run_together(program, _Threads(block_threads, grid, some, packed, memory, shared, profile))


def _run_together(program: Program, threads: _Threads) -> None:
    kernel, past = program.kernel, len(program.kernel.instructions)
    nobody = np.zeros(threads.count, bool)
    behind: dict[int, Mask] = {0: ~nobody}  # by the instruction that they run next
    at_barrier: dict[int, Mask] = {}
    alive = ~nobody
    while behind or at_barrier:
        if not behind:
            raise MachineError(f"{kernel.name}: threads wait at a barrier that others never reach")
        at = min(behind)
        mask = behind.pop(at)
        end = min(behind, default=past)
        while at < end:
            instruction, step = kernel.instructions[at], program.step(at)
            if threads.profile is not None:
                threads.profile.issued[instruction.op] += threads.warps_of(mask)
            if step is not None:
                step(threads, mask)
                at += 1
                continue
            taken = _guarded(threads, instruction, mask)
            mask, going = mask & ~taken, taken
            at += 1
            if instruction.op == "ret":
                alive = alive & ~going
                _release(threads, at_barrier, alive, behind)
            elif instruction.op == "bar.sync":
                at_barrier[at] = at_barrier.get(at, nobody) | going
                _release(threads, at_barrier, alive, behind)
            elif going.any():
                target = kernel.labels[instruction.operands[0]]
                behind[target] = behind.get(target, nobody) | going
            if not mask.any():
                break
            end = min(behind, default=past)
        if mask.any():
            if at >= past:
                raise MachineError(f"{kernel.name} has no end")
            behind[at] = behind.get(at, nobody) | mask


def _release(threads: _Threads, at_barrier: dict[int, Mask], alive: Mask, behind: dict[int, Mask]) -> None:
    """Lets those blocks go on all of whose living threads have arrived."""
    for at, waiting in list(at_barrier.items()):
        of_blocks = (waiting.reshape(-1, threads.block_threads), alive.reshape(-1, threads.block_threads))
        is_complete = (of_blocks[0] == of_blocks[1]).all(axis=1) & of_blocks[0].any(axis=1)
        if not is_complete.any():
            continue
        going = waiting & np.repeat(is_complete, threads.block_threads)
        threads.shared.barrier(np.flatnonzero(is_complete))
        behind[at] = behind[at] | going if at in behind else going
        at_barrier[at] = waiting & ~going
        if not at_barrier[at].any():
            del at_barrier[at]


def _guarded(threads: _Threads, instruction: Instruction, mask: Mask) -> Mask:
    if not instruction.guard:
        return mask
    predicate = threads.registers[instruction.guard]
    return mask & (~predicate if instruction.is_negated else predicate)


def _step(kernel: Kernel, instruction: Instruction) -> Step | None:
    """What the instruction does to threads; None for those that change which of them run."""
    op = instruction.op
    if op in ("bra", "bra.uni", "ret", "bar.sync"):
        return None
    if instruction.guard:
        step = _step(kernel, Instruction(op, instruction.operands, "", False))
        assert step is not None
        return lambda threads, mask: step(threads, _guarded(threads, instruction, mask))
    if op.startswith("call"):
        return _fail
    if op.startswith("shfl"):
        return _shuffle(kernel, instruction)
    if op.startswith(("ld.", "st.")):
        return _memory_step(kernel, instruction)
    return _arithmetic_step(kernel, instruction)


def _arithmetic_step(kernel: Kernel, instruction: Instruction) -> Step:
    target, *sources = instruction.operands
    try:
        compute, kinds = operation(instruction.op)
    except KeyError:
        raise MachineError(f"{instruction.op} is not known here") from None
    if target.startswith("{"):
        return _unpacking_step(kernel, target, sources[0])
    if sources[0].startswith("{"):  # mov.b32 register, {low,high}
        sources = [name.strip() for name in sources[0].strip("{}").split(",")]
        compute, kinds = (lambda low, high: low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)), ("u16",)
    fetches = [_fetch(kernel, source, kinds[min(index, len(kinds) - 1)]) for index, source in enumerate(sources)]
    width = DTYPES[_kind_of(target)].itemsize

    def step(threads: _Threads, mask: Mask) -> None:
        values = np.asarray(compute(*(fetch(threads) for fetch in fetches)))
        if values.dtype.itemsize != width:
            raise MachineError(f"{instruction.op} has a result of {values.dtype} for {target}")
        threads.set(target, values, mask)

    return step


def _unpacking_step(kernel: Kernel, targets: str, source: str) -> Step:
    """mov.b32 {low,high}, register"""
    low, high = (name.strip() for name in targets.strip("{}").split(","))
    whole = _fetch(kernel, source, "u32")

    def step(threads: _Threads, mask: Mask) -> None:
        threads.set(low, whole(threads).astype(np.uint16), mask)
        threads.set(high, (whole(threads) >> np.uint32(16)).astype(np.uint16), mask)

    return step


def _kind_of(register: str) -> str:
    found = re.match(r"%[a-z]+", register)
    return REGISTERS[found[0]] if found else "u16"  # the names in f16's conversion


def _fetch(kernel: Kernel, operand: str, kind: str) -> Fetch:
    """The operand as values of this type: a register, a number, or the place of a variable."""
    dtype = DTYPES[kind]
    if operand in kernel.places:
        place = dtype.type(kernel.places[operand].start)
        return lambda threads: place
    if (number := _number(operand, dtype)) is not None:
        return lambda threads: number
    if operand.startswith(("$", "__")):
        return lambda threads: dtype.type(0)  # texts for __assertfail

    def fetch(threads: _Threads) -> Values:
        values = threads.registers[operand]
        return values.view(dtype) if values.itemsize == dtype.itemsize else values.astype(dtype)

    return fetch


def _number(operand: str, dtype: np.dtype[Any]) -> Any:
    if operand.startswith(("0f", "0d")):
        bits = int(operand[2:], 16)
        return np.uint32(bits).view(np.float32) if operand[1] == "f" else np.uint64(bits).view(np.float64)
    if not operand.lstrip("-").isdigit():
        return None
    if dtype.kind == "b":
        return np.bool_(int(operand))
    return np.array(int(operand) % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)[()]


def _fail(threads: _Threads, mask: Mask) -> None:
    raise MachineError(f"an assertion of the kernel failed for {int(mask.sum())} threads")


def _shuffle(kernel: Kernel, instruction: Instruction) -> Step:
    if instruction.op != "shfl.sync.bfly.b32":
        raise MachineError(f"{instruction.op} is not known here")
    target = instruction.operands[0]
    sources = [operand for operand in instruction.operands[1:] if not operand.startswith("%p")]
    value, lanes, *checked = (_fetch(kernel, operand, kind) for operand, kind in zip(sources, ("u32", "u32", "s32", "s32"), strict=True))

    def step(threads: _Threads, mask: Mask) -> None:
        if any(
            (np.broadcast_to(fetch(threads), threads.count)[mask] != value).any() for fetch, value in zip(checked, EXCHANGED, strict=True)
        ):
            raise MachineError("only shuffles of whole warps are known here")
        of_warps = mask.reshape(-1, LANES)
        if (of_warps.any(axis=1) & ~of_warps.all(axis=1)).any():
            raise MachineError("a shuffle of a whole warp is reached by some of its lanes")
        threads.set(target, value(threads)[threads.lane ^ lanes(threads)], mask)

    return step


def _memory_step(kernel: Kernel, instruction: Instruction) -> Step:
    what, space, *vector, kind = instruction.op.replace("st.global.wb.", "st.global.").split(".")  # .wb is the default
    is_load = what == "ld"
    at, names = instruction.operands if not is_load else instruction.operands[::-1]
    found = ADDRESS.fullmatch(at)
    if found is None or space not in ("param", "global", "shared"):
        raise MachineError(f"{instruction.op} {at} is not known here")
    registers = [name.strip() for name in names.strip("{}").split(",")]
    if len(registers) != (int(vector[0][1:]) if vector else 1):
        raise MachineError(f"{instruction.op} has {len(registers)} registers")
    base, offset = _fetch(kernel, found["base"].strip(), "s64"), int(found["offset"] or 0)
    dtype = DTYPES[kind]
    fetches = [] if is_load else [_fetch(kernel, name, kind) for name in registers]
    nbytes = dtype.itemsize * len(registers)

    def step(threads: _Threads, mask: Mask) -> None:
        place = base(threads) + offset
        if not mask.any():
            return
        lanes = threads.lane[mask]
        addresses = np.broadcast_to(place, threads.count)[mask]
        if threads.profile is not None and space == "global":
            threads.profile.access(instruction.op, lanes, addresses, nbytes)
        if is_load:
            for name, found in zip(registers, _loaded(threads, space, lanes, addresses, dtype, len(registers)), strict=True):
                # A register may be wider than what it is loaded with.
                width = DTYPES[_kind_of(name)].itemsize
                values = np.zeros(threads.count, dtype if width == dtype.itemsize else f"{dtype.kind}{width}")
                values[mask] = found
                threads.set(name, values, mask)
            return
        stored = [np.broadcast_to(fetch(threads), threads.count)[mask] for fetch in fetches]
        if space == "global":
            threads.memory.store(addresses, stored)
        elif nbytes == 4:
            threads.shared.store(lanes, threads.local_block[mask], addresses, stored[0].view(np.uint32))
        else:
            raise MachineError(f"{instruction.op} is not known here")

    return step


def _loaded(
    threads: _Threads, space: str, lanes: NDArray[np.int64], addresses: NDArray[np.int64], dtype: np.dtype[Any], count: int
) -> list[Values]:
    if space == "global":
        return threads.memory.load(addresses, dtype, count)
    if space == "shared":
        if dtype.itemsize * count != 4:
            raise MachineError("only words of shared memory are known here")
        return [threads.shared.load(lanes, threads.local_block[lanes], addresses).view(dtype)]
    index = addresses[:, None] + np.arange(dtype.itemsize)
    if count != 1 or (index >= len(threads.parameters)).any():
        raise AccessError("a kernel reads beyond its parameters")
    return [threads.parameters[index].copy().view(dtype)[:, 0]]
