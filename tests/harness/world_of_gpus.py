"""A world of torch.distributed whose own group has a backend for GPUs alone, as in a run on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist


@contextmanager
def world_without_gloo() -> Iterator[None]:
    """Lets torch's own group send nothing from a CPU, as with NCCL alone. All groups that are made in the block have gloo."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (torch then knows the backend)

    init, new_group = dist.init_process_group, dist.new_group
    with (
        mock.patch.object(dist, "init_process_group", lambda backend, **others: init("cuda:fake", **others)),
        mock.patch.object(dist, "new_group", lambda ranks, **others: new_group(ranks, **{**others, "backend": "gloo"})),
    ):
        yield
