"""What somebody outside of the program does as a rank of a real world: runs an example, shards a module."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.zero.shard import leave_world, shard


def output_of_example(name: str, *arguments: object) -> str:
    """What `python -m examples.NAME ARGUMENTS` prints on this rank."""
    return _output_of([name, *map(str, arguments)], lambda: runpy.run_module(f"examples.{name}", run_name="__main__", alter_sys=True))


def output_of_program(path: str) -> str:
    """What a program in Python prints on this rank."""
    return _output_of([path], lambda: runpy.run_path(path, run_name="__main__"))


def _output_of(words: list[str], program: Callable[[], object]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        program()
    return printed.getvalue()


def error_without_local_world_size() -> str:
    """What shard() says on a rank whose launcher has not named the ranks of a node."""
    os.environ.pop("LOCAL_WORLD_SIZE")
    dist.init_process_group("gloo")
    try:
        shard(nn.Sequential(nn.Linear(2, 2)), ["0"])
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "no error"


def said_at_the_end(*, is_closed: bool) -> tuple[str, bool]:
    """What a program that shards a module says on this rank when it ends, and whether nothing is left to say once its engine is closed."""
    at_the_end: list[Callable[[], None]] = []
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as printed:
        patch.setattr(atexit, "register", at_the_end.append)
        patch.setattr(atexit, "unregister", at_the_end.remove)
        engine = shard(nn.Sequential(nn.Linear(2, 2)), ["0"])
        if is_closed:
            engine.close()
        for call in at_the_end:
            call()
        engine.close()
    leave_world()
    return printed.getvalue(), at_the_end == []


def reminders_of_a_refused_module() -> int:
    """How many reminders to close an engine are left on this rank where shard() has refused a module, so that there is no engine."""
    at_the_end: list[Callable[[], None]] = []
    dist.init_process_group("gloo")
    rank = float(dist.get_rank())
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atexit, "register", at_the_end.append)
        with pytest.raises(ValueError, match="first values of parameters"):
            shard(module, ["0"], initialize=lambda _, shape: torch.full(shape, rank))
    leave_world()
    return len(at_the_end)
