"""Selects the blocks that backward computes again, from the configuration alone (no torch)."""

from __future__ import annotations

from megatron_zpp.config.schema import ModelConfig


def recomputed_chunks(config: ModelConfig) -> tuple[range, ...]:
    """The chunks of blocks that are recomputed, each as a whole from the input of its first block. Other blocks keep their activations.

    uniform: all blocks, in chunks of --recompute-num-layers; the last one may be shorter. block: the first --recompute-num-layers blocks,
    each a chunk of its own.
    """
    if config.recompute_granularity != "full":
        return ()
    blocks, count = config.num_layers, config.recompute_num_layers or 1
    if config.recompute_method == "block":
        return tuple(range(block, block + 1) for block in range(count))
    return tuple(range(first, min(first + count, blocks)) for first in range(0, blocks, count))


def recomputed_blocks(config: ModelConfig) -> int:
    """The number of blocks that are recomputed as a whole."""
    return sum(len(chunk) for chunk in recomputed_chunks(config))


def recomputes_attention(config: ModelConfig) -> bool:
    """Whether every block recomputes its attention and nothing else."""
    return config.recompute_granularity == "selective"
