from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.model import compilation
from megatron_zpp.model.compilation import OPTIONS, check_compilation
from megatron_zpp.model.norm import rms_norm
from megatron_zpp.system.user_error import UserError


def test_a_machine_without_a_compiler_is_named_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_compiler(function: Any, **options: Any) -> Any:
        def fail(values: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("No working C++ compiler found.\nand many lines more")

        return fail

    monkeypatch.setattr(compilation.torch, "compile", without_compiler)
    with pytest.raises(UserError, match="--compile") as error:
        check_compilation(torch.device("cpu"))
    assert str(error.value).startswith("--compile: torch cannot compile for cpu here (No working C++ compiler found.); ")
    assert str(error.value).endswith("; install a C++ compiler (g++), or leave --compile out.")


@pytest.mark.filterwarnings("ignore:`torch.jit")  # that torch itself uses when it first compiles
def test_compiled_attention_drops_the_same_as_uncompiled() -> None:
    """Torch's dropout needs no kernel that it would have to compile, unless it draws other numbers than without compilation."""

    def dropped(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        return function(torch.ones(100))

    def drop(values: torch.Tensor) -> torch.Tensor:
        return F.dropout(values, 0.3)

    from torch._inductor import config as inductor_config

    with torch.random.fork_rng(), inductor_config.patch(compile_threads=1):
        assert torch.equal(dropped(torch.compile(drop, options=OPTIONS)), dropped(drop))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_traced_root_mean_square_norm_has_the_gradients_of_one_that_is_not(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values, gain, grad = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 2, 8), (8,), (6, 2, 8)))

    def gradients(norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        inputs = (values.clone().requires_grad_(), gain.clone().requires_grad_())
        return torch.autograd.grad(norm(*inputs, 1e-5), inputs, grad)

    traced = torch.compile(rms_norm, dynamic=False, backend="eager")
    assert all(map(torch.equal, gradients(rms_norm), gradients(traced)))
