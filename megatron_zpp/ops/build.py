"""Compiles the kernels of csrc/ and finds compiled ones.

The path of a build contains a key of everything that the build depends on. So after a change of sources, torch, processor or GPUs no build
is found, rather than a wrong one. A build is either for certain architectures of GPUs, or has no CUDA code at all.

    {TORCH_EXTENSIONS_DIR, else XDG_CACHE_HOME, else ~/.cache}/megatron_zpp/<key>/megatron_zpp_ops.so

A digest beside the library is verified before it is loaded, and file and folder must be the user's own, see `trust`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_zpp.ops.trust import WRITABLE_BY_OTHERS, put_in_place, why_not_loadable, why_not_ours
from megatron_zpp.system.file_lock import try_lock
from megatron_zpp.system.output_file import kept_file
from megatron_zpp.system.owner import is_abandoned, own_token
from megatron_zpp.system.user_error import UserError

INSTALLED_SOURCES = Path(__file__).parents[1] / "csrc"
SOURCES = INSTALLED_SOURCES if INSTALLED_SOURCES.is_dir() else Path(__file__).parents[2] / "csrc"
SOURCE_SUFFIXES = (".cpp", ".cu", ".h", ".txt")
COMPILED_SUFFIXES = (".cpp", ".cu")
CUDA_FOLDER = "cuda"
NVCC_OPTIONS = "nvcc_options.txt"  # in the folder of sources, one per line
LIBRARY_NAME = "megatron_zpp_ops"
FOLDER_VARIABLE = "TORCH_EXTENSIONS_DIR"
BUILD_PREFIX = "building-"  # of the folder in which a process compiles; its token follows
LOCK_TIMEOUT_SECONDS = 600.0
LOCK_POLL_SECONDS = 0.2

# No contraction and no fast-math, so that the bits equal those of the reference. The last two let the compiler vectorise loops.
COMPILER_FLAGS = ("-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
NATIVE_FLAG = "-march=native"
OPENMP_FLAG = "-fopenmp"

COMPILER_VARIABLE = "CXX"
DEFAULT_COMPILER = "c++"
DEFAULT_TOOLKIT = "/usr/local/cuda"  # a link of NVIDIA's packages to the toolkit that was installed last
PLACES_OF_NVCC = f"in CUDA_HOME, on PATH or in {DEFAULT_TOOLKIT}"
MOST_OF_AN_ERROR = 200  # characters; torch's may hold a whole command
ARCHITECTURES_VARIABLE = "TORCH_CUDA_ARCH_LIST"
OLDEST_ARCHITECTURE = (8, 0)
RULE_OF_ARCHITECTURES = "need numbers from 8.0 on, such as 8.0, 9.0 or 9.0+PTX"
_NINJA_SYNTAX = re.compile("[$:|\n\ud800-\udfff]")  # in a path, torch writes these into ninja's file as they are
_ARCHITECTURE = re.compile(r"\d+\.\d[af]?(\+PTX)?")


@dataclass(frozen=True)
class Build:
    """One way to build the kernels.

    portable: for every processor of the architecture rather than for this one; slower.
    cuda_architectures: compute capabilities of the GPUs, such as "9.0" or "9.0+PTX"; if empty, the build has no CUDA code.
    """

    sources: Path = SOURCES
    portable: bool = False
    cuda_architectures: tuple[str, ...] = ()

    def compiler_flags(self) -> list[str]:
        return [*COMPILER_FLAGS, *([] if self.portable else [NATIVE_FLAG]), *self.link_flags()]

    def nvcc_flags(self) -> list[str]:
        options = (self.sources / NVCC_OPTIONS).read_text().split()
        return [*options, *(flag for architecture in self.cuda_architectures for flag in _code_flags(architecture))]

    def link_flags(self) -> list[str]:
        return [OPENMP_FLAG] if torch.backends.openmp.is_available() else []

    def files(self) -> list[Path]:
        """The sources and headers of the build, sorted; empty if there is no csrc/."""
        return sorted(path for path in self.sources.rglob("*") if path.suffix in SOURCE_SUFFIXES and self._joins(path))

    def _joins(self, path: Path) -> bool:
        return bool(self.cuda_architectures) or CUDA_FOLDER not in path.relative_to(self.sources).parts

    def key(self) -> str:
        """16 hex digits: a hash of everything that the build depends on."""
        described = {
            "sources": {str(path.relative_to(self.sources)): hashlib.sha256(path.read_bytes()).hexdigest() for path in self.files()},
            "torch": (torch.__version__, torch.version.git_version, torch.version.cuda, torch.compiled_with_cxx11_abi()),
            "flags": self.compiler_flags(),
            "cuda architectures": self.cuda_architectures,
            "architecture": platform.machine(),
            "processor": "any" if self.portable else processor_features(),
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    def library(self) -> Path:
        """The path of the shared library, whether it is built or not. Raises RuntimeError if no folder is known for it."""
        return cache_folder(os.environ) / self.key() / f"{LIBRARY_NAME}.so"

    def make(self, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Path:
        """The shared library, compiled now unless a usable one exists. Several processes may call this at once; one of them compiles.

        Raises RuntimeError if the sources or the compiler are missing, or if the compiler fails.
        """
        if not self.files():
            raise RuntimeError(f"{self.sources} has no sources; install megatron_zpp again, or use a whole checkout of its repository.")
        return made_once(self.library(), self.compile, lock_timeout_seconds)

    def compile(self, folder: Path) -> Path:
        """The shared library, compiled in `folder`. Raises RuntimeError if the compiler fails."""
        compiler = _checked_compiler(os.environ)
        if self.cuda_architectures:
            toolkit = cuda_toolkit()
            _check_version(toolkit)
            os.environ["CUDA_HOME"] = str(toolkit)
        # Imported here, because torch's module looks for compilers and CUDA, which only a build needs.
        from setuptools import Distribution
        from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

        make_extension = CUDAExtension if self.cuda_architectures else CppExtension
        nvcc_flags = {"nvcc": [*self.nvcc_flags(), *_host_compiler_flags(os.environ)]} if self.cuda_architectures else {}
        extension = make_extension(
            LIBRARY_NAME,
            [str(path) for path in self.files() if path.suffix in COMPILED_SUFFIXES],
            extra_compile_args={"cxx": self.compiler_flags(), **nvcc_flags},
            extra_link_args=self.link_flags(),
            py_limited_api=True,  # the library does not use Python, so it works with every version of it
        )
        use_ninja = _has_ninja() and not any(map(_NINJA_SYNTAX.search, (str(self.sources), str(folder))))
        command = BuildExtension(Distribution({"ext_modules": [extension]}), no_python_abi_suffix=True, use_ninja=use_ninja)
        command.build_lib, command.build_temp = str(folder), str(folder / "objects")
        command.ensure_finalized()
        try:
            command.run()
        except Exception as error:  # setuptools and torch raise different types
            raise RuntimeError(
                f"the kernels could not be compiled with {compiler}; see its messages above; if it is too old, name another in "
                f"{COMPILER_VARIABLE} in the environment ({textwrap.shorten(str(error), MOST_OF_AN_ERROR)})"
            ) from error
        return next(folder.glob(f"{LIBRARY_NAME}*"))


def cuda_architectures(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPU architectures to build CUDA code for: those that TORCH_CUDA_ARCH_LIST names, else those of the GPUs of this machine.

    Architectures that are too old are left out, because containers name them for other programs. Empty if torch has no CUDA.
    Raises UserError for a name that is not a number, and if all are too old.
    """
    if torch.version.cuda is None:
        return ()
    named = _named_architectures(environment)
    if named:
        usable = tuple(name for name in named if not _is_too_old(name))
        if not usable:
            raise UserError(f"{ARCHITECTURES_VARIABLE} holds {' '.join(named)}, all too old; the kernels {RULE_OF_ARCHITECTURES}.")
        return usable
    return tuple(f"{major}.{minor}" for major, minor in sorted(set(present_capabilities())) if (major, minor) >= OLDEST_ARCHITECTURE)


def present_capabilities() -> list[tuple[int, int]]:
    """The compute capability of each GPU of this machine, in the order of their indices."""
    return [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]


def architectures_left_out(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The architectures that TORCH_CUDA_ARCH_LIST names and that are too old. Raises UserError for a name that is not a number."""
    return () if torch.version.cuda is None else tuple(filter(_is_too_old, _named_architectures(environment)))


def _checked_compiler(environment: Mapping[str, str]) -> str:
    """The command of the C++ compiler that torch calls. Raises RuntimeError if it is not installed."""
    compiler = environment.get(COMPILER_VARIABLE, "").strip() or DEFAULT_COMPILER
    if shutil.which(compiler.split()[0]) is None:
        raise RuntimeError(
            f"the kernels need a C++ compiler, and {compiler} is not on PATH; install one, such as GCC 11 or clang 14, "
            f"or name one in {COMPILER_VARIABLE} in the environment."
        )
    return compiler


def _host_compiler_flags(environment: Mapping[str, str]) -> list[str]:
    """The flags with which nvcc calls the C++ compiler of CXX; empty if CXX is unset or more than a name, or if torch passes that of CC."""
    named = environment.get(COMPILER_VARIABLE, "").split()
    return ["-ccbin", *named] if len(named) == 1 and "CC" not in environment else []


def _has_ninja() -> bool:
    """Whether ninja is found. One beside this Python comes onto PATH, where torch looks for it: its environment may not be active."""
    beside_python = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=beside_python) is not None:
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), beside_python)))
    return shutil.which("ninja") is not None


def has_nvcc() -> bool:
    """Whether CUDA's compiler is in CUDA_HOME, on PATH or in DEFAULT_TOOLKIT."""
    return _nvcc() is not None


def _named_architectures(environment: Mapping[str, str]) -> tuple[str, ...]:
    names = filter(None, re.split(r"[;,\s]+", environment.get(ARCHITECTURES_VARIABLE, "")))
    return tuple(dict.fromkeys(_checked_architecture(name) for name in names))


def _checked_architecture(name: str) -> str:
    if _ARCHITECTURE.fullmatch(name) is None:
        raise UserError(f"{ARCHITECTURES_VARIABLE} holds {name}, which is not a number; the kernels {RULE_OF_ARCHITECTURES}.")
    return name


def _is_too_old(name: str) -> bool:
    return number_of(name) < OLDEST_ARCHITECTURE


def number_of(name: str) -> tuple[int, int]:
    """The compute capability in the name of an architecture, such as (9, 0) of "9.0a+PTX"."""
    major, minor = map(int, re.findall(r"\d+", name))
    return major, minor


def _code_flags(architecture: str) -> list[str]:
    number = architecture.removesuffix("+PTX").replace(".", "")
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    if architecture.endswith("+PTX"):
        flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def _nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    in_homes = (found for home in homes if (found := shutil.which("nvcc", path=f"{home}/bin")))
    return next(in_homes, None) or shutil.which("nvcc") or shutil.which("nvcc", path=f"{DEFAULT_TOOLKIT}/bin")


def cuda_toolkit() -> Path:
    """The folder of CUDA's compiler and headers, as the compiler itself reports it: the nvcc on PATH may be a link or a script."""
    nvcc = _nvcc()
    if nvcc is None:
        raise RuntimeError(f"CUDA code needs nvcc, which is not {PLACES_OF_NVCC}.")
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, text=True, check=False
    )
    found = re.search(r"^#\$ _HERE_=(.+)$", dry_run.stderr, re.MULTILINE)
    return Path(found[1]).parent if found else Path(nvcc).resolve().parents[1]


def _check_version(toolkit: Path) -> None:
    """Raises RuntimeError if the toolkit is not of torch's version of CUDA; torch would refuse it, without saying what to do."""
    said = subprocess.run([toolkit / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release ((\d+)\.\d+)", said)
    if found and torch.version.cuda is not None and found[2] != (major := torch.version.cuda.partition(".")[0]):
        raise RuntimeError(
            f"{toolkit} is CUDA {found[1]}, and torch {torch.__version__} is built for CUDA {torch.version.cuda}; name the folder of a "
            f"toolkit of CUDA {major} in CUDA_HOME in the environment."
        )


def made_once(library: Path, compile_in: Callable[[Path], Path], lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Path:
    """`library`. If the file does not exist or must not be loaded, compile_in(folder) makes it, and a rename puts it in place as a whole.

    A lock keeps other processes from compiling it at the same time; a process that is killed loses the lock. After the timeout this process
    compiles anyway. Then both make the same file, and the later rename wins. Raises RuntimeError if the folder is not the user's own.
    """
    try:
        _make_own_folder(library.parent)
        with _locked(library.with_suffix(".lock"), lock_timeout_seconds):
            if why_not_loadable(library) is not None:
                _remove_leftovers(library.parent)
                folder = Path(tempfile.mkdtemp(prefix=f"{BUILD_PREFIX}{own_token()}.", dir=library.parent))
                try:
                    put_in_place(compile_in(folder), library)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise RuntimeError(
            f"{library} cannot be written ({error.strerror}); name a folder of your own in {FOLDER_VARIABLE} in the environment."
        ) from error
    return library


def _remove_leftovers(folder: Path) -> None:
    """Removes the folders of processes that were killed while they compiled. Those that compile without the lock keep theirs."""
    for path in folder.glob(f"{BUILD_PREFIX}*"):
        if is_abandoned(path, path.name.removeprefix(BUILD_PREFIX).partition(".")[0]):
            shutil.rmtree(path, ignore_errors=True)


def _make_own_folder(folder: Path) -> None:
    """Makes the folder, which nobody else can write to. Raises RuntimeError if it belongs to somebody else."""
    folder.mkdir(parents=True, exist_ok=True)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(status.st_mode) & ~WRITABLE_BY_OTHERS)
    finding = why_not_ours(folder)
    if finding is not None:
        raise RuntimeError(f"{folder} {finding}; name a folder of your own in {FOLDER_VARIABLE} in the environment.")
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise RuntimeError(
            f"{folder} is on a file system from which no code can be loaded (mounted with noexec); "
            f"name a folder on another one in {FOLDER_VARIABLE} in the environment."
        )


@contextmanager
def _locked(path: Path, timeout_seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_seconds
    with open(kept_file(path), "r+b") as file:
        while not try_lock(file) and time.monotonic() < deadline:
            time.sleep(LOCK_POLL_SECONDS)
        yield


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of everything that is compiled here. Raises RuntimeError if no folder is known for it."""
    try:
        cache = environment.get(FOLDER_VARIABLE) or environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # HOME is unset, and no user has this id, as in some containers
        raise RuntimeError(
            f"the user has no home folder to keep compiled kernels in; name a folder in {FOLDER_VARIABLE} in the environment."
        ) from None
    return Path(cache) / "megatron_zpp"


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Vendor, model and instructions of the processor, as Linux names them.

    The text differs between processors for which -march=native gives different code; nodes may share the folder of builds.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.processor()
    labels = ("vendor_id", "cpu family", "model", "flags", "Features")
    first_of = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(first_of[label] for label in labels if label in first_of)
