"""Loads the kernels of csrc/ (torch.ops.megatron_zpp) into this process if they are built; a run never compiles them.

    python -m megatron_zpp.ops.extension [--portable]

builds them. Without a build, ops run on the slower reference, with the same bits.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops import planned
from megatron_zpp.ops.build import (
    ARCHITECTURES_VARIABLE,
    PLACES_OF_NVCC,
    RULE_OF_ARCHITECTURES,
    SOURCES,
    Build,
    architectures_left_out,
    cache_folder,
    cuda_architectures,
    has_nvcc,
)
from megatron_zpp.ops.device_kind import kind_of
from megatron_zpp.ops.gpu_code import why_not_for_all_gpus
from megatron_zpp.ops.trust import why_not_loadable

REFERENCE_VARIABLE = "MEGATRON_ZPP_REFERENCE_OPS"
OPS = (
    "encode_blocks",
    "decode_blocks",
    "decode_mean_blocks",
    "recode_mean_blocks",
    "mean_values",
    "encode_gaussian",
    "decode_gaussian",
    "decode_mean_gaussian",
    "drop_values",
)
# Measured with four ranks of stage 3, as two nodes, on two cores. 8 layers of 512, one micro-batch: 17.9 s instead of 2.2 with lean, 5.9
# instead of 3.4 with ZeRO++; four micro-batches: 33.4 instead of 13.0 with lean. 4 layers of 256: 1.5 to 2.7 times as long.
COST_ON_CPUS = "but a step that quantizes takes 2 to 8 times as long"
LOSS_OPS = ("softmax_parts", "softmax_gradient")  # with kernels for GPUs only

_loaded: Path | None = None  # the library of this process; torch keeps it until the process ends
_refusal = ""  # why a build that exists was not loaded
_no_code = ""  # why the library cannot serve GPUs although it has CUDA code


def build_command(environment: Path) -> str:
    """The command that builds the kernels for the torch of an environment; the script of a checkout builds them for its own .venv."""
    return "bash scripts/build_extensions.sh" if environment == SOURCES.parent / ".venv" else "python -m megatron_zpp.ops.extension"


def load() -> bool:
    """Loads the kernels, and returns whether ops run on kernels from now on.

    The build for the GPUs of this machine is preferred to one without CUDA, and the build for this processor to a portable one.
    A build that is damaged, or that somebody else can have put there, is not loaded, and `report` names it.
    If TORCH_CUDA_ARCH_LIST makes no sense, only builds without CUDA are looked for, and `report` says why. If it names none of which a GPU
    of this machine runs code, the kernels do not serve GPUs, and `report` says that too.
    With MEGATRON_ZPP_REFERENCE_OPS=1 in the environment no kernels are loaded.
    """
    global _loaded, _refusal, _no_code
    if _loaded is None and not wants_reference(os.environ):
        architectures, _refusal = _architectures_here()
        for build in _candidates(architectures):
            try:
                library = build.library()
            except RuntimeError as error:
                _refusal = str(error)
                break
            if os.path.lexists(library):
                finding = _load(library)
                if finding is None:
                    _loaded = library
                    _no_code = why_not_for_all_gpus(build.cuda_architectures) if build.cuda_architectures else ""
                    break
                _refusal = _refusal or f"{library} {finding}"
    return _loaded is not None


def _load(library: Path) -> str | None:
    """Loads the library. Returns None, or why it was not loaded."""
    finding = why_not_loadable(library)
    if finding is None:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            return f"cannot be loaded ({error.__cause__ or error})"
        _register_fake_kernels()
    return finding


def _architectures_here() -> tuple[tuple[str, ...], str]:
    """The GPU architectures of the build to look for; none if the environment's list of them makes no sense, and why."""
    try:
        return cuda_architectures(os.environ), ""
    except ValueError as error:
        return (), str(error)


def _candidates(cuda_architectures: tuple[str, ...]) -> Iterator[Build]:
    for architectures in dict.fromkeys((cuda_architectures, ())):
        for portable in (False, True):
            yield Build(portable=portable, cuda_architectures=architectures)


def has_kernels_for(device_type: str) -> bool:
    """Whether ops on this type of device, except those of the loss, run on kernels rather than on the reference."""
    return _serves(device_type) and _are_registered(OPS, device_type)


def ops_for(tensor: Tensor, reference: ModuleType) -> ModuleType | Any:
    """The module whose functions run the ops, except those of the loss, on this tensor: the kernels, or else the reference."""
    if tensor.is_meta:
        return planned
    return torch.ops.megatron_zpp if has_kernels_for(tensor.device.type) else reference


def has_loss_kernels_for(device_type: str) -> bool:
    """Whether the ops of the loss run on kernels on this type of device. Of a GPU that is planned it is assumed."""
    if device_type == "meta":
        return kind_of(device_type) == "cuda"
    return _serves(device_type) and _are_registered(LOSS_OPS, device_type)


def _serves(device_type: str) -> bool:
    return _loaded is not None and not (device_type == "cuda" and _no_code)


@cache
def _are_registered(ops: tuple[str, ...], device_type: str) -> bool:
    """Asks torch's dispatcher. Cached, because every op call asks, and the answer does not change once the library is loaded."""
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(f"megatron_zpp::{op}", device_type.upper()) for op in ops)


def report(device_type: str = "cpu") -> str:
    """One sentence that says what ops on this type of device run on; if kernels are missing, with the command that builds them."""
    if has_kernels_for(device_type):
        return f"Quantization and dropout run on the {'C++' if device_type == 'cpu' else 'CUDA'} kernels in {_loaded}."
    if wants_reference(os.environ):
        return f"Quantization and dropout run on the plain-torch reference, because {REFERENCE_VARIABLE} is set: same bits, slower."
    reason = _refusal or (_no_code if device_type == "cuda" else "") or _nothing_is_built()
    cost = COST_ON_CPUS if device_type == "cpu" else "slower"
    command = build_command(Path(sys.prefix))
    return (
        f"Quantization and dropout run on the plain-torch reference, because {reason.removesuffix('.')}: same bits, {cost}. "
        f"This builds the kernels: {command}"
    )


def _nothing_is_built() -> str:
    if _loaded is not None:
        return f"{_loaded} has no code for GPUs"
    return f"{cache_folder(os.environ)} holds no kernels for this torch and this machine (a user with another HOME has another folder)"


def _register_fake_kernels() -> None:
    """Tells torch.compile and fake tensors that the ops return nothing; they write into tensors that already have their shape."""
    for op in (*OPS, *LOSS_OPS):
        torch.library.register_fake(f"megatron_zpp::{op}", _return_nothing)


def _return_nothing(*_arguments: object) -> None:
    return None


def wants_reference(environment: Mapping[str, str]) -> bool:
    """Whether the user wants ops to run on the reference."""
    return environment.get(REFERENCE_VARIABLE, "0") not in ("", "0")


def _buildable_architectures() -> tuple[str, ...]:
    """The GPU architectures that can be built for here. If torch has CUDA and there are none, prints what is missing.

    Prints which architectures of TORCH_CUDA_ARCH_LIST are left out, and which GPUs of this machine it has no code for. Raises UserError if
    none remains.
    """
    architectures = cuda_architectures(os.environ)
    left_out = architectures_left_out(os.environ)
    if left_out:
        print(f"Without code for {', '.join(left_out)}, which {ARCHITECTURES_VARIABLE} names: the kernels {RULE_OF_ARCHITECTURES}.")
    if torch.version.cuda is not None and not architectures:
        print(f"Without CUDA bodies: no GPU is here, and {ARCHITECTURES_VARIABLE} (such as 9.0) does not say for which to build them.")
    if architectures and not has_nvcc():
        print(f"Without CUDA bodies: nvcc is not {PLACES_OF_NVCC}.")
        return ()
    if architectures and (lacking := why_not_for_all_gpus(architectures)):
        print(f"Not for all GPUs of this machine: {lacking}")
    return architectures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_zpp.ops.extension", description="Builds the kernels of csrc/.")
    parser.add_argument("--portable", action="store_true", help="for every processor of this architecture rather than for this one; slower")
    portable = parser.parse_args(arguments).portable
    start = time.monotonic()
    try:
        library = Build(portable=portable, cuda_architectures=_buildable_architectures()).make()
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{library} ({time.monotonic() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
