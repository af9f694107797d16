"""An output that fails is named once, is switched off, and is named again at the end."""

from __future__ import annotations

import pytest

from megatron_zpp.monitor.jsonl import JsonLinesWriter
from megatron_zpp.monitor.output import Output
from megatron_zpp.system.user_error import UserError


def test_a_full_disk_is_named_once_and_again_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output("--log-jsonl /dev/full", lambda: JsonLinesWriter("/dev/full"), 3)
    calls = []

    def write(writer: JsonLinesWriter) -> None:
        calls.append(writer)
        writer.write({"iteration": len(calls)})

    output.attempt(write)
    output.attempt(write)
    failed = "failed (OSError: [Errno 28] No space left on device); it is switched off, and the run goes on without it"
    assert len(calls) == 1 and capsys.readouterr().err == f"[Rank 3] WARNING: --log-jsonl /dev/full {failed}.\n"
    output.tell_if_incomplete()
    assert capsys.readouterr().err == "[Rank 3] WARNING: --log-jsonl /dev/full is incomplete, because it failed during the run.\n"


def test_a_service_that_cannot_be_reached_at_the_start_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def unreachable() -> str:
        raise RuntimeError("network is\nunreachable")

    output = Output("--wandb-project p", unreachable, 0)
    output.attempt(lambda writer: pytest.fail("it is switched off"))
    assert "--wandb-project p failed (RuntimeError: network is unreachable); it is switched off" in capsys.readouterr().err


def test_a_mistake_of_the_user_is_raised_at_the_start() -> None:
    def refused() -> str:
        raise UserError("needs the package wandb")

    with pytest.raises(UserError, match="needs the package wandb"):
        Output("--wandb-project p", refused, 0)


def test_an_output_that_works_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    output = Output("lines", lambda: lines, 0)
    output.attempt(lambda writer: writer.append("a"))
    output.tell_if_incomplete()
    assert lines == ["a"] and capsys.readouterr().err == ""
