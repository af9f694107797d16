"""NVIDIA Apex is distinguished from a missing package and from the other program of that name; with it, results are those of torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.fake_apex import write_nvidia_apex, write_other_apex
from harness.fake_streams.gpus import run_on_gpus
from harness.small_engine import Job, Rank, train_world
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.norm import make_norm
from megatron_zpp.ops.apex import check_apex
from megatron_zpp.zero.adam import AdamGroup, AdamOptions, make_adam

pytestmark = pytest.mark.virtual

FAKED = ("apex", "amp_C", "fused_layer_norm_cuda")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose packages are found before others, only during the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in FAKED]:
        del sys.modules[name]


def test_missing_apex_is_an_error_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match="--optimizer-backend apex needs NVIDIA Apex, which is not installed.*choose --optimizer-backend torch"
    ):
        check_apex("--optimizer-backend", "amp_C", "cuda")


def test_the_other_program_called_apex_is_named_and_never_imported(path: Path) -> None:
    write_other_apex(path)
    with pytest.raises(ValueError, match=f"the package apex in {path / 'apex'} is another program.*uninstall it"):
        check_apex("--norm-backend", "fused_layer_norm_cuda", "cuda")
    assert "apex" not in sys.modules


def test_apex_without_its_extensions_is_refused(path: Path) -> None:
    write_nvidia_apex(path, has_extensions=False)
    with pytest.raises(ValueError, match="needs amp_C, but the NVIDIA Apex in .* was built without it"):
        check_apex("--optimizer-backend", "amp_C", "cuda")


def test_apex_that_was_built_for_another_torch_is_refused(path: Path) -> None:
    write_nvidia_apex(path)
    (path / "amp_C.py").write_text("raise ImportError('undefined symbol: _ZN2at4_ops')")
    with pytest.raises(ValueError, match="--optimizer-backend apex needs amp_C.*cannot be loaded .undefined symbol.*for this torch"):
        check_apex("--optimizer-backend", "amp_C", "cuda")


def test_apex_is_refused_without_a_gpu_and_accepted_with_one(path: Path) -> None:
    write_nvidia_apex(path)
    with pytest.raises(ValueError, match="--norm-backend apex needs a GPU, and this run is on cpu; choose --norm-backend torch"):
        check_apex("--norm-backend", "fused_layer_norm_cuda", "cpu")
    check_apex("--norm-backend", "fused_layer_norm_cuda", "cuda")


def test_training_with_fused_adam_and_the_multi_tensor_norm_is_training_with_torch(path: Path) -> None:
    """Within fp32 rounding: the stand-in computes the same update in another order, and the norm in fp32."""
    write_nvidia_apex(path)
    expected, found = (train_world((2, 2), Job(adam=AdamOptions(backend=backend))) for backend in ("torch", "apex"))
    for of_rank, expected_of_rank in zip(found, expected, strict=True):
        for step, expected_step in zip(of_rank, expected_of_rank, strict=True):
            assert step == pytest.approx(expected_step, rel=1e-5)
    assert found != expected


def test_steps_of_fused_adam_can_be_set_for_a_resume(path: Path) -> None:
    write_nvidia_apex(path)

    def program(backend: VirtualBackend) -> None:
        rank = Rank(dataclasses.replace(Job(), adam=AdamOptions(backend="apex")), backend)
        assert rank.engine.optimizer.steps == 0
        rank.engine.optimizer.resume(7, {})
        rank.step(0)
        assert rank.engine.optimizer.steps == 8
        rank.engine.close()

    run_world((1, 2), program)


def test_fused_adam_refuses_to_skip_a_step_on_the_device(path: Path) -> None:
    write_nvidia_apex(path)
    weight = torch.nn.Parameter(torch.ones(32))
    adam = make_adam([AdamGroup(True, 0, {weight: {}})], AdamOptions(backend="apex"))
    with pytest.raises(RuntimeError, match="read the gradient norm before the update"):
        adam.update(1e-3, 0.0, torch.zeros(()))


def test_on_streams_the_norm_is_read_before_fused_adam_and_the_bits_are_those_without_streams(path: Path) -> None:
    write_nvidia_apex(path)
    job = Job(adam=AdamOptions(backend="apex"))
    assert run_on_gpus((2, 2), lambda gpu: Rank(job, gpu.backend, lanes=gpu.lanes, streams=gpu.machine).train()) == train_world((2, 2), job)


@pytest.mark.parametrize(("normalization", "member"), [("LayerNorm", "FusedLayerNorm"), ("RMSNorm", "FusedRMSNorm")])
def test_the_norm_of_apex_is_made_for_the_models_dtype(path: Path, normalization: str, member: str) -> None:
    write_nvidia_apex(path)
    norm = make_norm(ModelConfig(norm_epsilon=1e-3, norm_backend="apex", normalization=normalization), 8, torch.bfloat16)
    assert type(norm).__name__ == member and norm.eps == 1e-3
    assert {parameter.dtype for parameter in norm.parameters()} == {torch.bfloat16}
