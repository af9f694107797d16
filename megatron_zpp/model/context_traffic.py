"""The bytes that one rank receives over the context link (pure arithmetic, no torch).

C context ranks divide the tokens of every sample: --context-parallel-size. n tokens of a micro-batch of whole samples, e bytes of an
activation; a rank has n / C tokens. A query channels, K key heads, D channels of a head, all of one tensor rank: model/attention.py.

Attention exchanges twice in forward. Queries, keys and values of the own tokens become those of all tokens and 1/C of the heads; what
attention makes of them becomes the own tokens of all heads again. Of each exchange a rank receives C - 1 parts:

    queries, keys, values    n/C tokens x (A/C + 2 k D) x e        k = K / C, or 1 if K < C: then several ranks get the same key head
    outputs                  n/C tokens x A/C x e

So forward is (C-1)/C x n e (2 A/C + 2 k D). Backward is as much, and recomputation of a whole block once more. With
--recompute-granularity selective the exchanged queries, keys and values are kept, and nothing is exchanged again.

Computation waits for all of it but the outputs' part of backward: the gradient of the output projection's input crosses beside the product
that makes the gradient of its weight, whose operations are those of the projection in forward. Then comes the attention kernel, which needs
what has crossed. Nor has computation anything else to do during the other exchanges: each is made of the product before it, and read by the
operation after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_blocks
from megatron_zpp.model.flops import projection_share
from megatron_zpp.parallel.link_work import NO_LINK_WORK, LinkWork, LinkWorkOfUses

NO_WORK = LinkWork()


@dataclass(frozen=True)
class DividedSamples:
    """Samples of a model whose tokens `context_ranks` ranks divide. tensor_ranks: that share every layer."""

    config: ModelConfig
    context_ranks: int
    tensor_ranks: int = 1

    @property
    def own(self) -> ModelConfig:
        """The configuration with samples as long as the part that one rank has."""
        return replace(self.config, seq_length=self.config.seq_length // self.context_ranks)

    @property
    def exchanged_key_heads(self) -> int:
        """Key heads of one tensor rank, counted once for every context rank that gets them."""
        return max(self.config.key_value_heads // self.tensor_ranks, 1, self.context_ranks)

    @property
    def repeated_key_channels(self) -> int:
        """Channels of keys and values of a token that ranks have only because others have them, too; for all ranks together."""
        of_tensor_rank = max(self.config.key_value_heads // self.tensor_ranks, 1)
        return 2 * (self.exchanged_key_heads - of_tensor_rank) * self.config.kv_channels

    @property
    def exchanged_channels(self) -> int:
        """Channels of a token in the exchange of queries, keys and values, for all ranks together."""
        return self._query_channels + 2 * self.exchanged_key_heads * self.config.kv_channels

    def exchanges(self, *, samples: int, element_bytes: int, is_backward: bool) -> LinkWork:
        """The two exchanges of one block's forward, or of its backward. samples: of a micro-batch."""
        if self.context_ranks == 1:
            return NO_WORK
        of_channel = (self.context_ranks - 1) * samples * self.own.seq_length * element_bytes
        inputs, outputs = (of_channel * channels // self.context_ranks for channels in (self.exchanged_channels, self._query_channels))
        return LinkWork(inputs, outputs, collectives=2) if is_backward else LinkWork(inputs + outputs, collectives=2)

    def work(self, *, samples: int, element_bytes: int) -> LinkWorkOfUses:
        """The work of embedding, blocks and final, in this order, for a micro-batch of `samples` samples."""
        if self.context_ranks == 1:
            return NO_LINK_WORK
        config, again = self.config, recomputed_blocks(self.config)  # the first ones, or all
        forward, backward = (
            self.exchanges(samples=samples, element_bytes=element_bytes, is_backward=is_backward) for is_backward in (False, True)
        )
        of_blocks = [backward + forward if block < again else backward for block in range(config.num_layers)]
        return LinkWorkOfUses(
            (NO_WORK, *[forward] * config.num_layers, NO_WORK), (NO_WORK, *of_blocks, NO_WORK), hiding=projection_share(config)
        )

    @property
    def _query_channels(self) -> int:
        return self.config.heads_width // self.tensor_ranks
