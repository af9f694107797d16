"""Keys for the counter-based generator of stochastic rounding."""

from __future__ import annotations

import hashlib

KEY_BITS = 63


def noise_key(*place: int | str) -> int:
    """A number of 63 bits that depends on every part of `place`, and on nothing else: not on history, process or machine."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - KEY_BITS)
