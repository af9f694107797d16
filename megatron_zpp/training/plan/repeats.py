"""Leaves out layers that are alike: a model with a few of them says what each of the others adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_blocks, recomputed_chunks
from megatron_zpp.zero.gradients import MOST_UNDER_WAY
from megatron_zpp.zero.schedule import Prefetch


@dataclass(frozen=True)
class Repeat:
    """Blocks of a small model that stand for others. times: how many more there are of them in the whole model."""

    blocks: range
    times: int
    is_recomputed: bool = False  # in one chunk

    @property
    def uses(self) -> range:
        """The numbers of their uses: the embedding comes first."""
        return range(self.blocks.start + 1, self.blocks.stop + 1)

    @property
    def units(self) -> frozenset[str]:
        return frozenset(f"block.{block}" for block in self.blocks)


def without_repeats(config: ModelConfig, prefetch: Prefetch) -> tuple[ModelConfig, tuple[Repeat, ...]]:
    """A model with fewer layers, and which of its layers stand for those that are left out.

    Of a row of layers that are alike, one stands so far from both ends that all it asks for ahead, and all that is still under way from
    before, belongs to layers of that row.
    """
    ahead = max(prefetch.inter_uses, prefetch.intra_uses)
    behind = max(ahead, MOST_UNDER_WAY)
    chunks = recomputed_chunks(config)
    if config.recompute_granularity == "full" and config.recompute_method != "block":
        per_chunk = len(chunks[0])
        first = -(-ahead // per_chunk)
        left_out = len(chunks) - (first + 1 + -(-behind // per_chunk) + (len(chunks[-1]) < per_chunk))
        if left_out < 1:
            return config, ()
        repeat = Repeat(range(first * per_chunk, (first + 1) * per_chunk), left_out, is_recomputed=True)
        return replace(config, num_layers=config.num_layers - left_out * per_chunk), (repeat,)
    repeats: list[Repeat] = []
    rows: list[int] = []
    recomputed = recomputed_blocks(config)
    for row in (recomputed, config.num_layers - recomputed):
        left_out = max(0, row - (ahead + 1 + behind))
        if left_out:
            first = sum(rows) + ahead
            repeats.append(Repeat(range(first, first + 1), left_out, is_recomputed=first < recomputed))
        rows.append(row - left_out)
    count = rows[0] if recomputed else config.recompute_num_layers
    return replace(config, num_layers=sum(rows), recompute_num_layers=count), tuple(repeats)
