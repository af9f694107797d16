"""Errors and arguments that must be alike on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_zpp.comm.backend import WorldGather
from megatron_zpp.system.user_error import UserError

LONGEST_MISTAKE = 1024  # bytes of a text that ranks exchange


@contextmanager
def raising_alike(backend: WorldGather, device: torch.device, error_of_others: type[UserError] = UserError) -> Iterator[None]:
    """Ends the block with an error on every rank if it raises one on any: with its own, or with one that names the first rank's."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, other ranks must not wait for this one
        own = error
    mistake = "" if own is None else (isinstance(own, ValueError) and str(own)) or repr(own)
    texts = _gather_texts(backend, device, mistake, LONGEST_MISTAKE)
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text:
            raise error_of_others(f"{text} (on rank {rank})")


def texts_of_ranks(backend: WorldGather, device: torch.device, own: str) -> list[str]:
    """`own` of every rank, in the order of ranks. Every rank must call it."""
    longest = int(backend.gather_world(torch.tensor([len(own.encode())], device=device)).max())
    return _gather_texts(backend, device, own, longest)


def _gather_texts(backend: WorldGather, device: torch.device, own: str, longest: int) -> list[str]:
    """longest: bytes of a text; what is longer is cut off."""
    row = torch.tensor(list(own.encode()[:longest].ljust(longest, b"\0")), dtype=torch.uint8, device=device)
    return [bytes(text).rstrip(b"\0").decode(errors="replace") for text in backend.gather_world(row).flatten(0, 1).tolist()]


def check_alike(
    backend: WorldGather, device: torch.device, content: bytes, what: str, remedy: str = " (torch.manual_seed)", member: str = "rank"
) -> None:
    """Raises UserError on every rank if `content` is not the same on all of them. member: what a rank of `backend` stands for."""
    number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
    numbers = backend.gather_world(torch.tensor([number], device=device)).flatten().tolist()
    others = [rank for rank, other in enumerate(numbers) if other != numbers[0]]
    if others:
        raise UserError(f"the {what} of {member}s {others} differ from those of {member} 0; give every {member} the same{remedy}")


def digest_of(parameters: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
