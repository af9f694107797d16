"""Divides the head and the loss of a micro-batch into chunks, from the configuration alone (no torch).

A chunk holds as many logits as N tokens have. Forward divides the tokens: a chunk has N of them, and the whole vocabulary. Backward divides
the vocabulary: a chunk has all tokens, and a part of the vocabulary.

    forward                 vocabulary          backward                vocabulary
                 tokens  |  chunk 0  |                       tokens  | c | c | c |
                         |  chunk 1  |                               | h | h | h |
                         |  chunk 2  |                               | 0 | 1 | 2 |
"""

from __future__ import annotations

from collections.abc import Iterator

ALIGNMENT = 128  # GPUs multiply matrices fastest if their sides are multiples of this


def has_chunks(tokens: int, chunk_tokens: int) -> bool:
    """Whether the loss of so many tokens is computed in chunks; chunk_tokens 0: never."""
    return 0 < chunk_tokens < tokens


def ranges(length: int, step: int) -> Iterator[slice]:
    """Neighbouring slices of `step` places of a dim; the last one may be shorter."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def chunk_columns(tokens: int, vocabulary: int, chunk_tokens: int) -> int:
    """The vocabulary entries of a chunk in backward: with all tokens, no more logits than a chunk in forward has."""
    columns = max(1, vocabulary * chunk_tokens // tokens)
    return columns - columns % ALIGNMENT if columns > ALIGNMENT else columns
