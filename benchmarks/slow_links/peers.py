"""The peers that the words of --peers name."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.slow_links.configurations import DEEPSPEEDS, FSDP2, PEERS
from benchmarks.slow_links.deepspeed_zero3 import check_installed


def peers_named(words: Sequence[str]) -> list[str]:
    """The names of the peers, in the order of PEERS. Raises ValueError without FSDP2, or if DeepSpeed is named and not installed."""
    names = [name for word, name in PEERS.items() if word in words]
    if FSDP2 not in names:
        raise ValueError(f"--peers {' '.join(words)} leaves out fsdp2, which the tables compare with; add fsdp2.")
    if any(name in DEEPSPEEDS for name in names):
        check_installed()
    return names
