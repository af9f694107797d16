"""Names of variables that reach bash on every host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from launching.host_commands import exported_variables, read_variables

from megatron_zpp.system.user_error import UserError

BAD_NAMES = ["CUDA_X;touch planted", "NCCL_$(touch planted)", "TORCH.X", "NCCL_A B", "PYTHON\u00e9", "BASH_FUNC_f%%"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_bash_would_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="^the environment has a variable .* which bash cannot set on other hosts; unset it.$") as raised:
        exported_variables({"NCCL_DEBUG": "WARN", name: "1"}, ["BASH_"], [])
    assert repr(name) in str(raised.value)
    file = tmp_path / "env"
    file.write_text(f"{name}=1\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 1: .* is not a variable; write it as NAME=value"):
        exported_variables({}, [], [file])


LINES = r"""
A=one
B="two words $A"
export C='$A stays'
D=$A:${B}:$UNSET:$HOME
E="say \"hi\" for \$5"  # a comment
F=a\ b#c
G=good morning
H='x'"y"z
I=
J=~/caches
K="~/caches"
L=it\'s
"""


def test_a_file_of_variables_is_read_as_bash_reads_it(tmp_path: Path) -> None:
    (tmp_path / "env").write_text(LINES)
    found = read_variables(tmp_path / "env", {"HOME": "/root"})
    assert found["G"] == "good morning"  # bash would run the command `morning`; DeepSpeed passes the words on
    names = [name for name in found if name != "G"]
    script = LINES.replace("G=good morning\n", "") + "".join(f"printf '%s\\0' \"${name}\"\n" for name in names)
    bash = subprocess.run(["bash", "-c", script], env={"HOME": os.path.expanduser("~")}, capture_output=True, text=True, check=True)
    expected = dict(zip(names, bash.stdout.split("\0")[:-1], strict=True))
    assert read_variables(tmp_path / "env", {"HOME": os.path.expanduser("~")}) == expected | {"G": "good morning"}


@pytest.mark.parametrize(
    ("value", "finding"),
    [
        ("'open", "has a quote without its end; add it"),
        ('"open', "has a quote without its end; add it"),
        ("$(hostname)", r"has \$\(, which only a shell can evaluate; write its value"),
        ('"`hostname`"', "has `, which only a shell can evaluate"),
        ("${A:-b}", r"has \$\{, which only a shell can evaluate"),
    ],
)
def test_what_only_a_shell_can_evaluate_is_refused_by_file_line_and_variable(tmp_path: Path, value: str, finding: str) -> None:
    (tmp_path / "env").write_text(f"# first\nA={value}\n")
    with pytest.raises(UserError, match=f"env, line 2: A {finding}"):
        read_variables(tmp_path / "env", {})


def test_other_variables_of_the_environment_may_have_any_name() -> None:
    assert exported_variables({"A.B": "1", "_NCCL_$()": "2", "NCCL_DEBUG": "WARN"}, [], []) == {"NCCL_DEBUG": "WARN"}
