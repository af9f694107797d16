"""Instructions and sectors of memory of every timed call, on the machine that runs what nvcc makes of the kernels.

As a program, it prints a JSON list of Work:

    python -m testbed.kernels.device_work SYMBOLS LIBRARY SLICES RUN_NUMEL BLOCK_NUMEL

SYMBOLS: as for launches.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_zpp.ops import extension
from testbed.kernels.ptx_machine.launches import Launches
from testbed.kernels.ptx_machine.machine import LANES, SECTOR_BYTES
from testbed.kernels.timed_ops import EXACT, Call, timed_ops

DROPPED = (EXACT, "dropout")

# What the units for integers do: 64 per clock and multiprocessor on sm_80 and sm_90, where 128 instructions are issued.
OF_ANY_TYPE = {"setp", "selp", "min", "max"}
OF_INTEGERS = {"add", "sub", "neg", "and", "or", "xor", "not", "shl", "shr", "prmt", "bfi"}
OF_PAIRS = {"cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"}


def is_half_rate(op: str) -> bool:
    """Whether the PTX instruction runs on the units for integers. Products do not."""
    name, kind = op.split(".")[0], op.rpartition(".")[2]
    return name in OF_ANY_TYPE or op in OF_PAIRS or (name in OF_INTEGERS and not kind.startswith("f"))


@dataclass(frozen=True)
class Work:
    """What one call does.

    nbytes: of its tensors, read and written. instructions: of PTX, of all threads, idle lanes of a warp among them. half_rate: those of
    them on the units for integers. sector_bytes: of the sectors that its warps' accesses touch, which is nbytes if each access fills them.
    """

    codes: str
    name: str
    nbytes: int
    instructions: int
    half_rate: int
    sector_bytes: int


def work(launches: Launches, slices: int, row_numel: int, block_numel: int) -> Iterator[Work]:
    """Of every call of timed_ops.py. Torch's own kernels are left out."""
    for codes, name, make in timed_ops(slices, row_numel, block_numel, "cpu"):
        if "torch" in name:
            continue
        call, nbytes = make()
        launches.profiles.clear()
        (_drop(slices * row_numel) if (codes, name) == DROPPED else call)()
        (profile,) = launches.profiles.values()
        issued, half_rate = (sum(profile.issued[op] for op in ops) for ops in (profile.issued, filter(is_half_rate, profile.issued)))
        yield Work(codes, name, nbytes, issued * LANES, half_rate * LANES, sum(profile.sectors.values()) * SECTOR_BYTES)


def _drop(numel: int) -> Call:
    """The kernel of dropout alone: the tensors of an op that another op calls are not seen here."""
    values = torch.randn(numel, dtype=torch.bfloat16)
    return partial(torch.ops.megatron_zpp.drop_values, values, torch.empty_like(values), 2**62, 3, 6553, 1 / 0.9)


def main() -> None:
    torch.manual_seed(1)  # which quotients take an encoder's slower way depends on the values
    symbols, library = map(Path, sys.argv[1:3])
    torch.ops.load_library(str(library))
    extension._loaded = library
    launches = Launches(library, symbols, is_profiled=True)
    with launches.tensors:
        found = [asdict(each) for each in work(launches, *map(int, sys.argv[3:6]))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
