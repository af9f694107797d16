"""What a divided layer exchanges over the tensor link for one micro-batch, and what of it runs beside computation (no torch).

Backward of a layer that divides its rows does not wait for

    without --sequence-parallel    the exchange of its sum, which runs beside the gradient of the weight; the gather follows
    with it                        the gather of its input, beside the gradient of that input, and the exchange of this gradient, beside the
                                   gradient of the weight

The sum of the head's input gradient has nothing beside it: with the loss in chunks, all gradients of the head are computed before.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.comm.tensor_bytes import gathered_bytes, sum_scattered_bytes, summed_bytes
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.link_work import LinkWork


@dataclass(frozen=True)
class LayerWork:
    """The work of each kind of layer.

    into: from hidden states to a layer that divides its rows; out_of: from a layer that divides its columns to hidden states. Both have
    a backward. final_backward: that of `into` at the head.
    """

    into: LinkWork
    into_backward: LinkWork
    out_of: LinkWork
    out_of_backward: LinkWork
    final_backward: LinkWork

    @property
    def block(self) -> LinkWork:
        """Forward of a block: qkv and up divide their rows, projection and down their columns."""
        return 2 * (self.into + self.out_of)

    @property
    def block_backward(self) -> LinkWork:
        return 2 * (self.into_backward + self.out_of_backward)

    def block_again(self, *, ends_chunk: bool) -> LinkWork:
        """Recomputation of a block. That of a chunk ends before its last sum, which backward does not need."""
        return 2 * self.into + self.out_of if ends_chunk else self.block

    @classmethod
    def of(cls, shape: ModelShape, *, samples: int, element_bytes: int) -> LayerWork:
        """The work for a micro-batch of `samples` samples. element_bytes: of an activation."""
        layers = cls.with_sequence_parallel if shape.sequence_parallel else cls.without_sequence_parallel
        return layers(samples * shape.config.seq_length * shape.config.hidden_size, shape.tensor_ranks, element_bytes)

    @classmethod
    def without_sequence_parallel(cls, numel: int, ranks: int, element_bytes: int) -> LayerWork:
        """numel: of the hidden states of all tokens."""
        whole_sum = LinkWork(summed_bytes(numel, ranks, element_bytes), collectives=2)
        half = whole_sum.nbytes // 2  # its exchange, or its gather
        return cls(LinkWork(), LinkWork(half, half, 2), whole_sum, LinkWork(), whole_sum)

    @classmethod
    def with_sequence_parallel(cls, numel: int, ranks: int, element_bytes: int) -> LayerWork:
        """numel: of the hidden states of all tokens."""
        nbytes = numel * element_bytes
        gathered, scattered = gathered_bytes(nbytes // ranks, ranks), sum_scattered_bytes(nbytes, ranks)
        gather, part = LinkWork(gathered, collectives=1), LinkWork(scattered, collectives=1)
        return cls(gather, LinkWork(overlapped_bytes=gathered + scattered, collectives=2), part, gather, part)
