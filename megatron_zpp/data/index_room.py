"""Checks that indices fit in the memory of this machine before they are built: a mistyped flag must not end in a MemoryError."""

from __future__ import annotations

from megatron_zpp.system.user_error import UserError

REMEDIES = {
    "train": "lower --train-iters or --train-samples",
    "valid": "lower --eval-iters, or raise --eval-interval",
    "test": "lower --eval-iters",
}


def check_room(needed_bytes: int, sample_count: int, what: str, split_name: str) -> None:
    """Raises UserError, naming the flags to change, if the machine has less memory to give.

    what: names the indices. split_name: "train", "valid" or "test", whose flags decide how many samples there are.
    """
    # Here, because it imports torch, which is not needed to load indices.
    from megatron_zpp.monitor.available_memory import CONTROL_GROUP, HOST_MEMORY, available_host_bytes

    available = available_host_bytes(HOST_MEMORY, CONTROL_GROUP)
    if available is not None and needed_bytes > available:
        raise UserError(
            f"{what} would take at least {needed_bytes / 1e9:.1f} GB of memory for {sample_count} samples, and this machine has "
            f"{available / 1e9:.1f} GB left; {REMEDIES[split_name]}."
        )
