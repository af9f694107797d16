"""Tells which errors leave a device unusable for the rest of the process."""

from __future__ import annotations


def is_fatal(error: BaseException) -> bool:
    """Whether the device cannot be used any more: an illegal access, a failed assertion or a failed launch."""
    text = str(error).lower()
    return "cuda error" in text and "out of memory" not in text
