from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.disk_events import disk_events
from torch.utils.cpp_extension import BuildExtension

from megatron_zpp.ops import build as build_module
from megatron_zpp.ops import trust
from megatron_zpp.ops.build import SOURCES, Build, architectures_left_out, cuda_architectures, made_once
from megatron_zpp.ops.trust import digest_path, why_not_loadable
from megatron_zpp.system.owner import own_token


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return shutil.copytree(SOURCES, tmp_path / "csrc")


def test_the_key_is_the_same_for_the_same_sources_anywhere(sources: Path) -> None:
    assert Build(sources).key() == Build().key()


@pytest.mark.parametrize("name", ["ops.h", "quantization/block_format.h", "quantization/cpu/encode.cpp"])
def test_a_changed_source_or_header_changes_the_key(sources: Path, name: str) -> None:
    (sources / name).write_text((sources / name).read_text() + "\n")
    assert Build(sources).key() != Build().key()


def _included(source: Path) -> set[str]:
    """The headers of others that a source includes, by itself or by headers of ours."""
    lines = source.read_text().splitlines()
    ours = [source.parent / line.split('"')[1] for line in lines if line.startswith('#include "')]
    others = {line.split("<")[1].split(">")[0] for line in lines if line.startswith("#include <")}
    return others.union(*map(_included, ours))


def test_only_registrations_include_torch_s_tensors_which_take_compilers_seconds() -> None:
    heavy = {"torch/library.h", "ATen/core/Tensor.h"}
    sources = [path for path in SOURCES.rglob("*") if path.suffix in build_module.COMPILED_SUFFIXES]
    found = {str(path.relative_to(SOURCES)) for path in sources if heavy & _included(path)}
    assert found == {"registration.cpp", "cuda/registration.cpp"}


def test_a_new_torch_processor_or_flag_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [Build().key(), Build(portable=True).key()]
    for owner, name, value in [
        (torch, "__version__", "9.9.9"),
        (torch.version, "git_version", "another"),
        (torch.version, "cuda", "99.9"),
        (torch, "compiled_with_cxx11_abi", lambda: "another"),
        (build_module, "processor_features", lambda: "another"),
        (build_module, "COMPILER_FLAGS", ("-O0",)),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(Build().key())
    assert len(set(keys)) == 8


CUDA_SOURCE = "quantization/cuda/encode.cu"


def test_cuda_bodies_join_builds_for_gpus_alone_and_change_no_other_key(sources: Path) -> None:
    cpu, gpu = Build(sources), Build(sources, cuda_architectures=("9.0",))
    assert sources / CUDA_SOURCE in gpu.files() and sources / CUDA_SOURCE not in cpu.files()
    keys = [cpu.key(), gpu.key(), Build(sources, cuda_architectures=("8.0", "9.0")).key()]
    assert len(set(keys)) == 3
    (sources / CUDA_SOURCE).write_text("// another\n")
    assert cpu.key() == keys[0] and gpu.key() != keys[1]


@pytest.mark.parametrize(
    "named, found",
    [("9.0", ("9.0",)), ("8.0;9.0+PTX", ("8.0", "9.0+PTX")), ("8.6 9.0a, 8.6", ("8.6", "9.0a"))],
)
def test_architectures_are_those_that_the_environment_names(named: str, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert cuda_architectures({"TORCH_CUDA_ARCH_LIST": named}) == found


def test_a_torch_without_cuda_has_no_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda_architectures({"TORCH_CUDA_ARCH_LIST": "9.0"}) == ()


@pytest.mark.parametrize("name", ["Hopper", "90"])
def test_architectures_that_are_no_numbers_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for read in (cuda_architectures, architectures_left_out):
        with pytest.raises(
            ValueError, match=f"TORCH_CUDA_ARCH_LIST holds {name}, which is not a number; the kernels need numbers from 8.0 on"
        ):
            read({"TORCH_CUDA_ARCH_LIST": f"9.0 {name}"})


def test_of_a_containers_architectures_those_that_are_too_old_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    container = {"TORCH_CUDA_ARCH_LIST": "5.2 6.0 7.0 7.5+PTX 8.0 8.6 9.0 10.0 12.0+PTX"}
    assert cuda_architectures(container) == ("8.0", "8.6", "9.0", "10.0", "12.0+PTX")
    assert architectures_left_out(container) == ("5.2", "6.0", "7.0", "7.5+PTX")
    assert architectures_left_out({}) == () == architectures_left_out({"TORCH_CUDA_ARCH_LIST": "9.0"})
    assert (
        Build(cuda_architectures=cuda_architectures(container)).key()
        == Build(cuda_architectures=cuda_architectures({"TORCH_CUDA_ARCH_LIST": "8.0 8.6 9.0 10.0 12.0+PTX"})).key()
    )


def test_architectures_that_are_all_too_old_are_an_error_that_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST holds 7.0 7.5, all too old; the kernels need numbers from 8.0 on, such as"):
        cuda_architectures({"TORCH_CUDA_ARCH_LIST": "7.0;7.5"})


def test_the_compiler_is_told_each_architecture_and_the_rules_of_the_arithmetic() -> None:
    flags = Build(cuda_architectures=("8.0", "9.0+PTX")).nvcc_flags()
    assert {"--fmad=false", "--prec-div=true", "--ftz=false"} <= set(flags)
    assert [flag for flag in flags if "gencode" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_builds_lie_in_the_folder_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert Build().library() == tmp_path / "cache" / "megatron_zpp" / Build().key() / "megatron_zpp_ops.so"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    assert Build().library().is_relative_to(tmp_path / "extensions")


def _compiled(calls: list[Path], seconds: float = 0.0) -> object:
    def compile_in(folder: Path) -> Path:
        calls.append(folder)
        time.sleep(seconds)
        (folder / "made.so").write_text("library")
        return folder / "made.so"

    return compile_in


def test_of_several_builders_at_once_one_compiles_and_all_get_the_library(tmp_path: Path) -> None:
    library, calls, found = tmp_path / "key" / "library.so", [], []

    def make() -> None:
        found.append(made_once(library, _compiled(calls, seconds=0.3), 60).read_text())

    builders = [threading.Thread(target=make) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert found == ["library"] * 4
    assert len(calls) == 1
    assert sorted(path.name for path in library.parent.iterdir()) == ["library.lock", "library.so", "library.so.sha256"]


def test_a_build_removes_what_a_killed_process_left_and_not_what_others_compile(tmp_path: Path) -> None:
    place, own_id, started = own_token().split("-")
    tokens = {"dead": f"{place}-{own_id}-0", "alive": f"{place}-{own_id}-{started}", "elsewhere": f"{int(place, 16) ^ 1:08x}-1-1"}
    for name, token in tokens.items():
        (tmp_path / f"building-{token}.{name}" / "objects").mkdir(parents=True)
    made_once(tmp_path / "library.so", _compiled([]), 0.0)
    assert {path.suffix for path in tmp_path.glob("building-*")} == {".alive", ".elsewhere"}


def test_a_lock_file_that_nobody_holds_does_not_delay(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.with_suffix(".lock").write_text("left behind")
    assert made_once(library, _compiled(calls := []), 0.0) == library
    assert len(calls) == 1


def test_a_lock_that_is_never_released_delays_for_the_timeout_only(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    with open(library.with_suffix(".lock"), "ab") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        start = time.monotonic()
        assert made_once(library, _compiled(calls := []), 0.3).read_text() == "library"
    assert len(calls) == 1
    assert time.monotonic() - start < 10


def test_a_failed_build_leaves_nothing_that_looks_like_one(tmp_path: Path) -> None:
    def fail(folder: Path) -> Path:
        (folder / "half.so").write_text("half")
        raise RuntimeError("no compiler")

    library = tmp_path / "library.so"
    with pytest.raises(RuntimeError, match="no compiler"):
        made_once(library, fail, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["library.lock"]


def test_missing_sources_are_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has no sources; install megatron_zpp again"):
        Build(tmp_path / "csrc").make()


def test_what_the_compiler_refuses_ends_in_a_runtime_error(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "broken.cpp").write_text("this is not C++\n")
    with pytest.raises(RuntimeError, match="the kernels could not be compiled"):
        Build(tmp_path / "csrc").compile(tmp_path)


def test_a_missing_compiler_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "missing-c++ -pthread")
    with pytest.raises(RuntimeError, match=r"missing-c\+\+ -pthread is not on PATH; install one, .* or name one in CXX in the environment"):
        Build().compile(tmp_path)


def test_a_toolkit_of_another_cuda_than_torch_s_is_refused_with_both_versions_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.4, V12.4.131\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    words = f"{tmp_path} is CUDA 12.4, and torch .* is built for CUDA 13.0; name .* of CUDA 13 in CUDA_HOME"
    with pytest.raises(RuntimeError, match=words):
        Build(cuda_architectures=("9.0",)).compile(tmp_path)


def test_nvcc_is_also_found_where_nvidia_s_packages_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_module, "DEFAULT_TOOLKIT", str(tmp_path / "cuda"))
    assert not build_module.has_nvcc()
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch(0o755)
    assert build_module.has_nvcc()


@pytest.mark.parametrize(
    ("environment", "flags"),
    [({}, []), ({"CXX": "g++-13"}, ["-ccbin", "g++-13"]), ({"CXX": "ccache g++"}, []), ({"CXX": "g++-13", "CC": "gcc-13"}, [])],
)
def test_nvcc_calls_the_compiler_that_the_environment_names(environment: dict[str, str], flags: list[str]) -> None:
    assert build_module._host_compiler_flags(environment) == flags


def test_a_ninja_beside_this_python_is_found_where_the_environment_is_not_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("on_path", "beside_python"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(build_module.sysconfig, "get_path", lambda name: str(tmp_path / "beside_python"))
    monkeypatch.setenv("PATH", str(tmp_path / "on_path"))
    assert not build_module._has_ninja() and os.environ["PATH"] == str(tmp_path / "on_path")
    ninja = tmp_path / "beside_python" / "ninja"
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    assert build_module._has_ninja() and shutil.which("ninja") == str(ninja)


@pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja")
@pytest.mark.parametrize(("name", "uses_ninja"), [("a b'c", True), ("$HOME", False), ("a:b", False), ("a|b", False), ("w\udcf6", False)])
def test_ninja_is_not_used_for_a_path_that_torch_writes_for_it_in_a_wrong_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, uses_ninja: bool
) -> None:
    (tmp_path / name / "csrc").mkdir(parents=True)
    (tmp_path / name / "csrc" / "one.cpp").write_text("int one();\n")
    asked: list[bool] = []

    def note(command: BuildExtension) -> None:
        asked.append(command.use_ninja)
        (Path(command.build_lib) / f"{build_module.LIBRARY_NAME}.so").touch()

    monkeypatch.setattr(BuildExtension, "run", note)
    Build(tmp_path / name / "csrc").compile(tmp_path)
    assert asked == [uses_ninja]


def test_a_folder_from_which_no_code_can_be_loaded_is_refused_before_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    with pytest.raises(RuntimeError, match=r"mounted with noexec\); name a folder on another one in TORCH_EXTENSIONS_DIR"):
        made_once(tmp_path / "library.so", _compiled(calls := []), 0.0)
    assert calls == []


def test_a_user_without_a_home_folder_is_told_which_variable_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", without_home)
    with pytest.raises(RuntimeError, match="has no home folder .* name a folder in TORCH_EXTENSIONS_DIR in the environment"):
        Build().library()


def damage(library: Path, kind: str) -> None:
    content = library.read_bytes()
    if kind == "empty":
        library.write_bytes(b"")
    elif kind == "cut":
        library.write_bytes(content[:-1])
    elif kind == "flipped":
        library.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif kind == "without digest":
        digest_path(library).unlink()
    elif kind == "digest is a pipe":
        digest_path(library).unlink()
        os.mkfifo(digest_path(library))
    elif kind == "for all to write":
        library.chmod(0o777)
    elif kind == "for the group to write":
        library.chmod(0o775)
    elif kind == "link":
        library.rename(library.with_name("elsewhere"))
        library.symlink_to("elsewhere")
    elif kind == "pipe":
        library.unlink()
        os.mkfifo(library)


DAMAGES = [
    ("empty", "does not have the digest in library.so.sha256"),
    ("cut", "does not have the digest"),
    ("flipped", "does not have the digest"),
    ("without digest", "cannot be verified .library.so.sha256 cannot be read .No such file or directory"),
    ("digest is a pipe", "cannot be verified .library.so.sha256 cannot be read .it is a pipe"),
    ("for all to write", "can be changed by other users"),
    ("for the group to write", "can be changed by other users"),
    ("link", "is a symbolic link"),
    ("pipe", "it is a pipe, not a regular file"),
]


@pytest.mark.parametrize(("kind", "words"), DAMAGES)
def test_a_library_that_must_not_be_loaded_is_named_and_made_anew(tmp_path: Path, kind: str, words: str) -> None:
    library = made_once(tmp_path / "key" / "library.so", _compiled(calls := []), 0.0)
    assert why_not_loadable(library) is None
    damage(library, kind)
    found = why_not_loadable(library)
    assert found is not None and re.search(words, found)
    assert made_once(library, _compiled(calls), 0.0).read_text() == "library"
    assert why_not_loadable(library) is None and not library.is_symlink()
    assert len(calls) == 2


def test_a_library_or_a_folder_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = made_once(tmp_path / "key" / "library.so", _compiled([]), 0.0)
    monkeypatch.setattr(trust, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: library.stat().st_uid + 1)
    assert why_not_loadable(library) == f"lies in a folder that belongs to the user with the id {library.stat().st_uid}"
    with pytest.raises(RuntimeError, match="key belongs to the user with the id .* a folder of your own in TORCH_EXTENSIONS_DIR"):
        made_once(library, _compiled([]), 0.0)


def test_a_folder_that_others_can_write_to_is_closed_before_a_build_and_not_loaded_from(tmp_path: Path) -> None:
    library = made_once(tmp_path / "key" / "library.so", _compiled([]), 0.0)
    library.parent.chmod(0o777)
    assert why_not_loadable(library) == "lies in a folder that can be changed by other users"
    assert why_not_loadable(made_once(library, _compiled([]), 0.0)) is None
    library.parent.rename(tmp_path / "elsewhere")
    library.parent.symlink_to("elsewhere")
    assert why_not_loadable(library) == "lies in a folder that is a symbolic link"
    with pytest.raises(RuntimeError, match="key is a symbolic link"):
        made_once(library, _compiled([]), 0.0)


def test_library_and_digest_are_on_the_disk_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = disk_events(monkeypatch)
    made_once(tmp_path / "key" / "library.so", _compiled([]), 0.0)
    assert events == ["sync library.so.sha256", "sync made.so", "rename library.so.sha256", "rename library.so", "sync key"]


def test_a_link_in_the_place_of_the_lock_is_refused_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "library.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(RuntimeError, match="library.so cannot be written .it is a symbolic link.; name a folder of your own"):
        made_once(tmp_path / "key" / "library.so", _compiled([]), 0.0)
    assert (tmp_path / "victim").read_text() == "kept"
