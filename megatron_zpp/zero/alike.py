"""Errors and arguments that must be alike on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Backend

LONGEST_MISTAKE = 1024  # bytes of a text that ranks exchange


@contextmanager
def raising_alike(backend: Backend, device: torch.device) -> Iterator[None]:
    """Raises ValueError on every rank if the block raises one on any: with its own text, or with that of the first rank that has one."""
    mistake = ""
    try:
        yield
    except ValueError as error:
        mistake = str(error)
    own = torch.tensor(list(mistake.encode()[:LONGEST_MISTAKE].ljust(LONGEST_MISTAKE, b"\0")), dtype=torch.uint8, device=device)
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in backend.gather_world(own).flatten(0, 1).tolist()]
    for rank, text in enumerate(texts):
        if text:
            raise ValueError(mistake or f"{text} (on rank {rank})")


def check_alike(backend: Backend, device: torch.device, content: bytes, what: str) -> None:
    """Raises ValueError on every rank if `content` is not the same on all of them."""
    number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
    numbers = backend.gather_world(torch.tensor([number], device=device)).flatten().tolist()
    others = [rank for rank, other in enumerate(numbers) if other != numbers[0]]
    if others:
        raise ValueError(f"the {what} of ranks {others} differ from those of rank 0; give every rank the same (torch.manual_seed)")


def digest_of(parameters: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
