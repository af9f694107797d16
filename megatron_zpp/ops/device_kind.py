"""The kind of a device: what its operations run on, cpu or cuda.

Tensors of a plan are on the meta device, where nothing is computed. They stand for tensors of the kind that is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_planned_kind = "meta"


def kind_of(device_type: str) -> str:
    """`cpu` or `cuda`; `meta` only where nothing is planned. device_type: of a torch.device."""
    return _planned_kind if device_type == "meta" else device_type


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Inside the block, tensors on the meta device stand for those of this kind of device. One thread plans at a time."""
    global _planned_kind
    before, _planned_kind = _planned_kind, kind
    try:
        yield
    finally:
        _planned_kind = before
