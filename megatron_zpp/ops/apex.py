"""NVIDIA Apex, where a flag asks for it: https://github.com/NVIDIA/apex, built with its CUDA extensions.

Package indexes have another program under the name `apex`; it is told apart before anything is imported from it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HOME = "https://github.com/NVIDIA/apex"
_MARK = Path("optimizers") / "fused_adam.py"  # a file of NVIDIA's, and of no other apex


def check_apex(flag: str, extension: str, device_type: str) -> None:
    """Nothing, where NVIDIA Apex can serve `flag` on this kind of device.

    extension: the compiled module that it takes, such as "amp_C". Raises ValueError saying what is missing and what to do.
    """
    wish = f"{flag} apex"
    if device_type != "cuda":
        raise ValueError(f"{wish} needs a GPU, and this run is on {device_type}; choose {flag} torch.")
    spec = find_spec("apex")
    if spec is None:
        raise ValueError(
            f"{wish} needs NVIDIA Apex, which is not installed; build it with its CUDA extensions from {HOME}, {_or_torch(flag)}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / _MARK).is_file() for folder in folders):
        found = folders[0] if folders else spec.origin
        raise ValueError(
            f"{wish} needs NVIDIA Apex, and the package apex in {found} is another program, the one that package indexes have; "
            f"uninstall it and build NVIDIA's with its CUDA extensions from {HOME}, {_or_torch(flag)}"
        )
    if find_spec(extension) is None:
        raise ValueError(
            f"{wish} needs {extension}, which the NVIDIA Apex in {folders[0]} was built without; "
            f"build it again with its CUDA extensions ({HOME}), {_or_torch(flag)}"
        )
    try:
        import_module(extension)
    except ImportError as error:
        raise ValueError(
            f"{wish} needs {extension}, and that of the NVIDIA Apex in {folders[0]} cannot be loaded ({error}); "
            f"build it again for this torch ({HOME}), {_or_torch(flag)}"
        ) from error


def apex_member(module: str, name: str) -> Any:
    """`name` of a module of NVIDIA Apex, which check_apex has found."""
    return getattr(import_module(module), name)


def _or_torch(flag: str) -> str:
    return f"or choose {flag} torch."
