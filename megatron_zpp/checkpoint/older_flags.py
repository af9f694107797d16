"""What the flags of a checkpoint are, if it was saved before a flag existed (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_zpp.checkpoint.manifest import Manifest

# By group. Runs of that time behaved as with these values, which are not today's defaults.
OLDER_VALUES: Mapping[str, Mapping[str, Any]] = {
    "data": {"legacy_tokenizer": True, "blend_normalization": "once"},
    "model": {"openai_gelu": True},
}


def flags_of(manifest: Manifest, group: str) -> dict[str, Any]:
    """The flags of a group that the checkpoint's run had; empty if the checkpoint has no flags of this group."""
    stored: Mapping[str, Any] = manifest.flags.get(group, {})
    return {**OLDER_VALUES.get(group, {}), **stored} if stored else {}
