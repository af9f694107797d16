"""Names of variables that reach bash on every host."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_commands import exported_variables

BAD_NAMES = ["CUDA_X;touch planted", "NCCL_$(touch planted)", "TORCH.X", "NCCL_A B", "PYTHON\u00e9", "BASH_FUNC_f%%"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_bash_would_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="^the environment has a variable .* which bash cannot set on other hosts; unset it.$") as raised:
        exported_variables({"NCCL_DEBUG": "WARN", name: "1"}, ["BASH_"], [])
    assert repr(name) in str(raised.value)
    file = tmp_path / "env"
    file.write_text(f"{name}=1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: .* is not a variable; write it as NAME=value"):
        exported_variables({}, [], [file])


def test_other_variables_of_the_environment_may_have_any_name() -> None:
    assert exported_variables({"A.B": "1", "_NCCL_$()": "2", "NCCL_DEBUG": "WARN"}, [], []) == {"NCCL_DEBUG": "WARN"}
