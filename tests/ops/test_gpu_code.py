from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.ops import extension, gpu_code
from megatron_zpp.ops.build import Build
from megatron_zpp.ops.gpu_code import gpus_without_code, runs_on, why_not_for_all_gpus
from megatron_zpp.parallel.initialize import StartupError, World
from megatron_zpp.training import kernels


@pytest.mark.parametrize(
    "architecture, runs, does_not_run",
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("8.0+PTX", [(8, 0), (8, 9), (9, 0), (12, 1)], [(7, 5)]),
        ("9.0a", [(9, 0)], [(8, 9), (10, 0)]),
        ("9.0a+PTX", [(9, 0)], [(10, 0)]),
        ("10.0f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("10.0f+PTX", [(10, 0), (10, 3)], [(12, 0)]),
        ("12.0+PTX", [(12, 0), (12, 1)], [(9, 0), (10, 0)]),
    ],
)
def test_a_gpu_runs_code_of_its_major_number_up_to_its_minor_one_and_any_older_ptx_that_has_no_suffix(
    architecture: str, runs: list[tuple[int, int]], does_not_run: list[tuple[int, int]]
) -> None:
    assert all(runs_on(architecture, capability) for capability in runs)
    assert not any(runs_on(architecture, capability) for capability in does_not_run)


@pytest.mark.parametrize(
    "architectures, capabilities, lacking",
    [
        (("8.0", "9.0"), [(9, 0), (8, 6)], {}),
        (("8.0",), [(8, 0), (9, 0), (8, 9), (10, 0)], {1: (9, 0), 3: (10, 0)}),
        (("9.0",), [(7, 5), (9, 0)], {}),  # a GPU for the screen
        (("8.0",), [(7, 5)], {0: (7, 5)}),
        (("8.0",), [], {}),
    ],
)
def test_gpus_without_code_are_named_unless_they_are_too_old_beside_others(
    architectures: tuple[str, ...], capabilities: list[tuple[int, int]], lacking: dict[int, tuple[int, int]]
) -> None:
    assert gpus_without_code(architectures, capabilities) == lacking


def with_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(gpu_code, "present_capabilities", lambda: list(capabilities))


def test_the_reason_names_gpus_and_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, (10, 0), (9, 0), (9, 0))
    assert why_not_for_all_gpus(("8.0", "8.6")) == (
        "TORCH_CUDA_ARCH_LIST names 8.0 8.6, and GPU 0 (10.0), GPU 1 (9.0), GPU 2 (9.0) does not run such code; add 9.0 10.0 to it."
    )
    assert why_not_for_all_gpus(("8.0+PTX",)) == ""
    with_gpus(monkeypatch, (7, 5))
    assert why_not_for_all_gpus(("8.0",)).endswith("does not run such code; the kernels need GPUs from 8.0 on.")


@pytest.fixture
def loaded_for_8_0(no_kernels: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library that stands in for a build for 8.0, on a machine with a GPU of 9.0."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    monkeypatch.delenv(extension.REFERENCE_VARIABLE, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with_gpus(monkeypatch, (9, 0))
    library = Build(cuda_architectures=("8.0",)).library()
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(extension, "_load", lambda library: None)
    monkeypatch.setattr(extension, "_are_registered", lambda ops, device_type: True)
    assert extension.load()
    return library


def test_kernels_without_code_for_a_gpu_of_this_machine_serve_cpus_alone_and_the_report_says_why(loaded_for_8_0: Path) -> None:
    served = {
        (device, asked(device)) for device in ("cpu", "cuda") for asked in (extension.has_kernels_for, extension.has_loss_kernels_for)
    }
    assert served == {("cpu", True), ("cuda", False)}
    reason = "because TORCH_CUDA_ARCH_LIST names 8.0, and GPU 0 (9.0) does not run such code; add 9.0 to it: same bits, slower."
    assert f"run on the plain-torch reference, {reason} This builds the kernels: " in extension.report("cuda")
    assert extension.report("cpu").endswith(f"C++ kernels in {loaded_for_8_0}.")


@pytest.mark.usefixtures("loaded_for_8_0")
def test_a_rank_whose_gpu_the_kernels_have_no_code_for_is_refused_by_name() -> None:
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --zero-stage 3 --zero-quantized-weights"
    world = cast(World, SimpleNamespace(device=torch.device("cuda"), gather_texts=lambda text: [text]))
    with pytest.raises(StartupError, match=r"rank 0 on a: .* names 8.0, and GPU 0 \(9.0\) does not run such code; add 9.0 to it"):
        kernels.prepare_kernels(resolve(parse_flags(shape.split()), 1, 1), world, ["a"])


def test_a_build_says_which_gpus_it_is_not_for(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(extension, "has_nvcc", lambda: True)
    monkeypatch.setattr(Build, "make", lambda build: Path("library"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    with_gpus(monkeypatch, (8, 0), (9, 0))
    assert extension.main([]) == 0
    told = capfd.readouterr().out
    assert told.startswith(
        "Not for all GPUs of this machine: TORCH_CUDA_ARCH_LIST names 8.0, and GPU 1 (9.0) does not run such code; add 9.0"
    )
