"""Finds NVIDIA Apex (https://github.com/NVIDIA/apex, built with its CUDA extensions) if a flag needs it.

Package indexes have another program named `apex`. It is recognised before anything is imported from it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_zpp.system.user_error import UserError

HOME = "https://github.com/NVIDIA/apex"
_MARK = Path("optimizers") / "fused_adam.py"  # a file that only NVIDIA's apex has


def check_apex(flag: str, extension: str, device_type: str) -> None:
    """Raises UserError, saying what is missing and what to do, if NVIDIA Apex cannot be used for `flag` on this type of device.

    extension: the compiled module that is needed, such as "amp_C".
    """
    wish = f"{flag} apex"
    if device_type != "cuda":
        raise UserError(f"{wish} needs a GPU, and this run is on {device_type}; choose {flag} torch.")
    spec = find_spec("apex")
    if spec is None:
        raise UserError(
            f"{wish} needs NVIDIA Apex, which is not installed; build it with its CUDA extensions from {HOME}, {_or_torch(flag)}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / _MARK).is_file() for folder in folders):
        found = folders[0] if folders else spec.origin
        raise UserError(
            f"{wish} needs NVIDIA Apex, but the package apex in {found} is another program, the one from a package index; "
            f"uninstall it and build NVIDIA's with its CUDA extensions from {HOME}, {_or_torch(flag)}"
        )
    if find_spec(extension) is None:
        raise UserError(
            f"{wish} needs {extension}, but the NVIDIA Apex in {folders[0]} was built without it; "
            f"build it again with its CUDA extensions ({HOME}), {_or_torch(flag)}"
        )
    try:
        import_module(extension)
    except ImportError as error:
        raise UserError(
            f"{wish} needs {extension}, but that of the NVIDIA Apex in {folders[0]} cannot be loaded ({error}); "
            f"build it again for this torch ({HOME}), {_or_torch(flag)}"
        ) from error


def apex_member(module: str, name: str) -> Any:
    """The attribute `name` of a module of NVIDIA Apex; call check_apex first."""
    return getattr(import_module(module), name)


def _or_torch(flag: str) -> str:
    return f"or choose {flag} torch."
