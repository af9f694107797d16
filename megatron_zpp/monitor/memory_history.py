"""A record of every allocation on the GPU."""

from __future__ import annotations

from pathlib import Path

import torch

LARGEST_ENTRIES = 1_000_000  # allocations and frees kept, the latest ones; a few hundred bytes of host memory each


class MemoryHistory:
    """Records from now on; `close` writes the snapshot that pytorch.org/memory_viz reads, also where memory was exhausted."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path.with_name(f"{path.stem}_rank_{rank}{path.suffix}")
        torch.cuda.memory._record_memory_history(max_entries=LARGEST_ENTRIES)

    def close(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self._path))
        torch.cuda.memory._record_memory_history(enabled=None)
