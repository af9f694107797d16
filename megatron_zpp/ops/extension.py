"""The kernels of csrc/ (torch.ops.megatron_zpp) in this process: loaded where they are built, never compiled on the way.

    python -m megatron_zpp.ops.extension [--portable]

builds them. Without a build, ops run on the slower reference, with the same bits.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_zpp.ops.build import Build

REFERENCE_VARIABLE = "MEGATRON_ZPP_REFERENCE_OPS"
BUILD_COMMAND = "bash scripts/build_extensions.sh"
OPS = ("encode_blocks", "decode_blocks", "decode_mean_blocks", "recode_mean_blocks")

_loaded: Path | None = None  # the library of this process; torch keeps it until the process ends


def load() -> bool:
    """Whether ops run on kernels from now on: loads the build for this processor, else a portable one.

    MEGATRON_ZPP_REFERENCE_OPS=1 in the environment keeps to the reference.
    """
    global _loaded
    if _loaded is None and not _wants_reference(os.environ):
        _loaded = next((build.library() for build in (Build(), Build(portable=True)) if build.library().is_file()), None)
        if _loaded is not None:
            torch.ops.load_library(str(_loaded))
            _register_fake_kernels()
    return _loaded is not None


def has_kernels_for(device_type: str) -> bool:
    """Whether ops on this type of device run on loaded kernels rather than on the reference."""
    return _loaded is not None and device_type == "cpu"


def report() -> str:
    """One sentence on what the ops of this process run on, with the command that builds the kernels where they are missing."""
    if _loaded is not None:
        return f"Quantization runs on the C++ kernels in {_loaded}."
    if _wants_reference(os.environ):
        return f"Quantization runs on the plain-torch reference, because {REFERENCE_VARIABLE} is set: same bits, slower."
    return f"Quantization runs on the plain-torch reference: same bits, slower. This builds the kernels: {BUILD_COMMAND}"


def _register_fake_kernels() -> None:
    """Tells torch.compile and fake tensors that the ops return nothing; what they write to has its shape already."""
    for op in OPS:
        torch.library.register_fake(f"megatron_zpp::{op}", _return_nothing)


def _return_nothing(*_arguments: object) -> None:
    return None


def _wants_reference(environment: Mapping[str, str]) -> bool:
    return environment.get(REFERENCE_VARIABLE, "0") not in ("", "0")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_zpp.ops.extension", description="Builds the kernels of csrc/.")
    parser.add_argument("--portable", action="store_true", help="for every processor of this architecture rather than for this one; slower")
    build = Build(portable=parser.parse_args(arguments).portable)
    start = time.monotonic()
    try:
        library = build.make()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{library} ({time.monotonic() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
