"""What somebody outside of the program does as a rank of a real world: runs an example, shards a module."""

from __future__ import annotations

import contextlib
import io
import os
import runpy

import torch.distributed as dist
from torch import nn

from harness.places import ROOT
from megatron_zpp.zero.shard import shard


def output_of_example(name: str) -> str:
    """What examples/NAME prints on this rank."""
    return output_of_program(str(ROOT / "examples" / name))


def output_of_program(path: str) -> str:
    """What a program in Python prints on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
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
