from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_zpp.model import compilation
from megatron_zpp.model.compilation import check_compilation


def test_a_machine_without_a_compiler_is_named_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_compiler(function: Any, **options: Any) -> Any:
        def fail(values: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("No working C++ compiler found.\nand many lines more")

        return fail

    monkeypatch.setattr(compilation.torch, "compile", without_compiler)
    with pytest.raises(ValueError, match="--compile") as error:
        check_compilation(torch.device("cpu"))
    assert str(error.value).startswith("--compile: torch cannot compile for cpu here (No working C++ compiler found.); ")
    assert str(error.value).endswith("; install a C++ compiler (g++), or leave --compile out.")
