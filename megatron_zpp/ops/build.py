"""One build of the kernels of csrc/: what it depends on, where it lies, and how it comes to be there.

A build lies under a key of all it depends on: after a change of sources, torch or processor there is no build, rather than a wrong one.

    {TORCH_EXTENSIONS_DIR, else XDG_CACHE_HOME, else ~/.cache}/megatron_zpp/<key>/megatron_zpp_ops.so
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[2] / "csrc"
SOURCE_SUFFIXES = (".cpp", ".h")
LIBRARY_NAME = "megatron_zpp_ops"
LOCK_TIMEOUT_SECONDS = 600.0
LOCK_POLL_SECONDS = 0.2
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)

# No contraction and no fast-math: the bits are those of the reference. That nothing reads errno or traps lets loops be vectorised.
COMPILER_FLAGS = ("-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
NATIVE_FLAG = "-march=native"
OPENMP_FLAG = "-fopenmp"


@dataclass(frozen=True)
class Build:
    """One way to build the kernels.

    portable: for every processor of the architecture rather than for this one; slower.
    """

    sources: Path = SOURCES
    portable: bool = False

    def compiler_flags(self) -> list[str]:
        return [*COMPILER_FLAGS, *([] if self.portable else [NATIVE_FLAG]), *self.link_flags()]

    def link_flags(self) -> list[str]:
        return [OPENMP_FLAG] if torch.backends.openmp.is_available() else []

    def files(self) -> list[Path]:
        """Sources and headers, sorted; none where csrc/ is not beside the package."""
        return sorted(path for path in self.sources.rglob("*") if path.suffix in SOURCE_SUFFIXES)

    def key(self) -> str:
        """16 hex digits of everything that the build depends on."""
        described = {
            "sources": {str(path.relative_to(self.sources)): hashlib.sha256(path.read_bytes()).hexdigest() for path in self.files()},
            "torch": torch.__version__,
            "flags": self.compiler_flags(),
            "architecture": platform.machine(),
            "processor": "any" if self.portable else _processor_features(),
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    def library(self) -> Path:
        """Where the shared library is once it is built."""
        return _cache_folder(os.environ) / self.key() / f"{LIBRARY_NAME}.so"

    def make(self, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Path:
        """The shared library, compiled now unless it is there. Any number of processes may call this at once; one of them compiles.

        Raises RuntimeError where the sources are missing or the compiler fails.
        """
        if not self.files():
            raise RuntimeError(f"{self.sources} has no sources; a checkout of the repository has them (pip install --editable .).")
        return made_once(self.library(), self.compile, lock_timeout_seconds)

    def compile(self, folder: Path) -> Path:
        """The shared library, made in `folder`. Raises RuntimeError where the compiler fails."""
        # Imported here: torch's module looks for compilers and CUDA, which building alone needs.
        from setuptools import Distribution
        from torch.utils.cpp_extension import BuildExtension, CppExtension

        extension = CppExtension(
            LIBRARY_NAME,
            [str(path) for path in self.files() if path.suffix == ".cpp"],
            extra_compile_args=self.compiler_flags(),
            extra_link_args=self.link_flags(),
            py_limited_api=True,  # nothing of Python is in the library: it serves every version of it
        )
        has_ninja = shutil.which("ninja") is not None
        command = BuildExtension(Distribution({"ext_modules": [extension]}), no_python_abi_suffix=True, use_ninja=has_ninja)
        command.build_lib, command.build_temp = str(folder), str(folder / "objects")
        command.ensure_finalized()
        try:
            command.run()
        except Exception as error:  # setuptools and torch each have kinds of their own
            raise RuntimeError(f"the kernels could not be compiled, the compiler's messages say why: {error}") from error
        return next(folder.glob(f"{LIBRARY_NAME}*"))


def made_once(library: Path, compile_in: Callable[[Path], Path], lock_timeout_seconds: float) -> Path:
    """`library`, after compile_in(folder) -> file made it unless it was there; it appears whole or not at all.

    A lock keeps others from compiling the same. It goes when its holder ends, however that ends. After the timeout this process compiles
    for itself; then both make the same file, and the later rename wins.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with _locked(library.with_suffix(".lock"), lock_timeout_seconds):
        if not library.is_file():
            folder = Path(tempfile.mkdtemp(prefix="building-", dir=library.parent))
            try:
                os.replace(compile_in(folder), library)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return library


@contextmanager
def _locked(path: Path, timeout_seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_seconds
    with open(path, "ab") as file:
        while not _try_lock(file.fileno()) and time.monotonic() < deadline:
            time.sleep(LOCK_POLL_SECONDS)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Where the file system has no locks, waiting for one would not help.
        if error.errno not in NO_LOCKS_HERE:
            raise
    return True


def _cache_folder(environment: Mapping[str, str]) -> Path:
    cache = environment.get("TORCH_EXTENSIONS_DIR") or environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "megatron_zpp"


def _processor_features() -> str:
    """What tells processors apart for which -march=native gives different code: nodes may share the folder of builds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    labels = ("vendor_id", "cpu family", "model", "flags", "Features")
    first_of = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(first_of[label] for label in labels if label in first_of)
