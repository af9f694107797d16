"""Runs the kernels that an emulated library launches on the machine beside, instead of compiled for the CPU.

As a program: `launches.py SYMBOLS PROGRAM LIBRARY ARGUMENTS...` is PROGRAM with the kernels of LIBRARY run here, and a line with the number
of kernels that it has launched. SYMBOLS: from symbols_of.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from testbed.kernels.ptx_machine.machine import Profile, Program, run
from testbed.kernels.ptx_machine.memory import GlobalMemory
from testbed.kernels.ptx_machine.module import Module

SET_HOOK = "cuda_on_cpu_set_launch_hook"
# kernel, columns and rows of the grid, threads of a grid block, and the parameters: their addresses, sizes and number.
Hook = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_uint,
)


def symbols_of(library: Path, modules: Iterable[Path], target: Path) -> None:
    """Writes a file that says which entry of which PTX module each kernel of the emulated library is."""
    entries = {}
    for path in modules:
        names = Module(path.read_text()).names
        entries.update({_plain(readable): (str(path), name) for readable, name in zip(_demangled(names), names, strict=True)})
    symbols: dict[str, Any] = {}
    for line in subprocess.run(["nm", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout.splitlines():
        address, _, name = line.split()
        symbols[name] = int(address, 16)
    kernels = {
        symbols[name]: entries[_plain(readable)]
        for readable, name in zip(_demangled(list(symbols)), symbols, strict=True)
        if _plain(readable) in entries
    }
    target.write_text(json.dumps({"hook": symbols[SET_HOOK], "kernels": kernels}))


def _demangled(names: list[str]) -> list[str]:
    return subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()


def _plain(name: str) -> str:
    """Without the return type, which only some have."""
    return name.removeprefix("void ")


class _Extents(TorchDispatchMode):
    """The memory of the tensors that the op which runs was given."""

    def __init__(self) -> None:
        super().__init__()
        self.extents: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "megatron_zpp":  # type: ignore[attr-defined]
            storages = [tensor.untyped_storage() for tensor in tensors]
            self.extents = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return func(*args, **(kwargs or {}))


class Launches:
    """Takes over the launches of the library, which is loaded. profiles: of kernels, by their entry; without: a statement to leave out."""

    def __init__(self, library: Path, symbols: Path, *, is_profiled: bool = False, without: str | None = None) -> None:
        record = json.loads(symbols.read_text())
        loaded = ctypes.CDLL(str(library))
        set_hook = loaded[SET_HOOK]
        base = (ctypes.cast(set_hook, ctypes.c_void_p).value or 0) - record["hook"]
        self.entries = {base + int(offset): (Path(path), name) for offset, (path, name) in record["kernels"].items()}
        self._hook = Hook(self._launch)  # kept alive
        self.tensors = _Extents()
        self.profiles: defaultdict[str, Profile] = defaultdict(Profile)
        self.launched: set[int] = set()
        self._is_profiled, self._without = is_profiled, without
        set_hook(self._hook)

    def _launch(self, kernel: int, columns: int, rows: int, threads: int, addresses: Any, sizes: Any, count: int) -> None:
        try:
            path, name = self.entries[kernel]
            parameters = [ctypes.string_at(addresses[index], sizes[index]) for index in range(count)]
            profile = self.profiles[name] if self._is_profiled else None
            run(_program(path, name, self._without), (columns, rows), threads, parameters, GlobalMemory(self.tensors.extents), profile)
            self.launched.add(kernel)
        except BaseException:
            # An exception cannot cross the library that calls this.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


@cache
def _module(path: Path, without: str | None) -> Module:
    text = path.read_text()
    return Module(text if without is None else text.replace(without, ""))


@cache
def _program(path: Path, name: str, without: str | None) -> Program:
    return Program(_module(path, without).kernel(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", metavar="STATEMENT", help="leave this out of the PTX wherever it stands")
    for name in ("symbols", "program", "library"):
        parser.add_argument(name)
    args, arguments = parser.parse_known_args()
    torch.ops.load_library(args.library)
    launches = Launches(Path(args.library), Path(args.symbols), without=args.without)
    sys.argv = [args.program, args.library, *arguments]
    with launches.tensors:
        runpy.run_path(args.program, run_name="__main__")
    print(len(launches.launched))


if __name__ == "__main__":
    main()
