from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.places import ROOT

from megatron_zpp.ops import extension
from megatron_zpp.ops.build import Build
from megatron_zpp.ops.trust import digest_path


@pytest.mark.usefixtures("kernels")
def test_loaded_kernels_serve_tensors_of_the_devices_they_were_built_for_and_the_report_names_the_library() -> None:
    library, is_for_cpus_alone = extension._loaded, extension._loaded == Build().library()
    assert extension.has_kernels_for("cpu")
    assert extension.report() == f"Quantization and dropout run on the C++ kernels in {library}."
    assert extension.has_kernels_for("cuda") != is_for_cpus_alone
    assert extension.report("cuda").endswith(f"This builds the kernels: {extension.build_command(Path(sys.prefix))}") == is_for_cpus_alone


def test_the_command_builds_for_the_environment_that_lacks_kernels() -> None:
    assert extension.build_command(ROOT / ".venv") == "bash scripts/build_extensions.sh"
    assert extension.build_command(Path("/opt/conda")) == "python -m megatron_zpp.ops.extension"


@pytest.mark.usefixtures("no_kernels")
def test_without_a_build_nothing_is_compiled_and_the_report_names_folder_cost_and_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(extension.REFERENCE_VARIABLE, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert not extension.load()
    assert not extension.has_kernels_for("cpu")
    assert list(tmp_path.iterdir()) == []
    assert (
        f"because {tmp_path}/megatron_zpp holds no kernels for this torch and this machine (a user with another HOME" in extension.report()
    )
    assert extension.report().endswith(f"as long. This builds the kernels: {extension.build_command(Path(sys.prefix))}")
    assert "a step that quantizes takes 2 to 8 times as long. " in extension.report("cpu")
    assert ": same bits, slower. " in extension.report("cuda")  # not measured on GPUs, where such a run is refused


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("has_digest", [False, True])
def test_a_build_that_is_damaged_is_not_loaded_and_the_report_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_digest: bool
) -> None:
    monkeypatch.delenv(extension.REFERENCE_VARIABLE, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library = Build().library()
    library.parent.mkdir(parents=True)
    library.parent.chmod(0o755)
    library.write_bytes(b"")
    library.chmod(0o755)
    if has_digest:
        digest_path(library).write_text(hashlib.sha256(b"").hexdigest())
    assert not extension.load()
    reason = f"cannot be loaded ({library}: file too short)" if has_digest else "cannot be verified ("
    assert extension.report().startswith(f"Quantization and dropout run on the plain-torch reference, because {library} {reason}")
    assert extension.report().endswith(f"as long. This builds the kernels: {extension.build_command(Path(sys.prefix))}")


@pytest.mark.usefixtures("no_kernels")
def test_a_user_without_a_home_folder_trains_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (extension.REFERENCE_VARIABLE, "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", without_home)
    assert not extension.load()
    assert "reference, because the user has no home folder to keep compiled kernels in; name a folder in" in extension.report()


@pytest.mark.usefixtures("no_kernels")
def test_the_environment_can_keep_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extension.REFERENCE_VARIABLE, "1")
    assert not extension.load()
    assert "because MEGATRON_ZPP_REFERENCE_OPS is set" in extension.report()


@pytest.mark.usefixtures("no_kernels")
def test_architectures_that_are_all_too_old_end_no_run_and_the_report_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(extension.REFERENCE_VARIABLE, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not extension.load()
    assert "because TORCH_CUDA_ARCH_LIST holds 7.0, all too old; the kernels need numbers from 8.0 on" in extension.report("cuda")


def test_a_build_says_once_which_architectures_it_leaves_out_and_fails_if_none_remains(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    built: list[tuple[str, ...]] = []

    def make(build: Build) -> Path:
        built.append(build.cuda_architectures)
        return Path("library")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(extension, "has_nvcc", lambda: True)
    monkeypatch.setattr(Build, "make", make)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0 7.5 8.0 9.0+PTX")
    assert extension.main([]) == 0
    assert built == [("8.0", "9.0+PTX")]
    told = capfd.readouterr().out
    assert told.startswith("Without code for 7.0, 7.5, which TORCH_CUDA_ARCH_LIST names: the kernels need numbers from 8.0 on")
    assert told.count("7.5") == 1
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert extension.main([]) == 1
    assert "holds 7.5, all too old" in capfd.readouterr().err
    assert len(built) == 1


@pytest.mark.usefixtures("kernels")
def test_a_second_build_finds_the_first_and_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    assert [extension.main([]), extension.main([])] == [0, 0]  # where torch and nvcc can, the first builds those for GPUs too
    path, _, seconds = capfd.readouterr().out.splitlines()[-1].rpartition(" (")  # a line before it may say what is left out
    assert (Path(path).name, Path(path).exists(), seconds) == (Build().library().name, True, "0 s)")


def test_importing_the_ops_neither_loads_kernels_nor_looks_for_compilers() -> None:
    imports = "import sys; from megatron_zpp.ops import extension, quantization"
    program = f"{imports}; print('torch.utils.cpp_extension' in sys.modules, extension._loaded)"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert finished.stdout == "False None\n"
