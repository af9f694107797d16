"""Which blocks backward computes again, from the configuration alone (no torch)."""

from __future__ import annotations

from megatron_zpp.config.schema import ModelConfig


def recomputed_chunks(config: ModelConfig) -> tuple[range, ...]:
    """The first blocks, as chunks that are recomputed whole from the input of their first block; blocks after them keep their activations.

    uniform: all blocks, by --recompute-num-layers, the last chunk what is left. block: --recompute-num-layers chunks of one block.
    """
    if config.recompute_granularity != "full":
        return ()
    blocks, count = config.num_layers, config.recompute_num_layers or 1
    if config.recompute_method == "block":
        return tuple(range(block, block + 1) for block in range(count))
    return tuple(range(first, min(first + count, blocks)) for first in range(0, blocks, count))


def recomputed_blocks(config: ModelConfig) -> int:
    """How many blocks are recomputed whole."""
    return sum(len(chunk) for chunk in recomputed_chunks(config))


def recomputes_attention(config: ModelConfig) -> bool:
    """Whether attention alone is recomputed, in every block."""
    return config.recompute_granularity == "selective"
