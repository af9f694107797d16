"""What each use of a GPT exchanges over the tensor link (pure arithmetic, no torch). model/tensor_traffic.py adds up all uses.

With --partition-activations the gather of a chunk's input runs beside the first products of the chunk after it, and backward waits for
that of the last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.layer_work import LayerWork
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.model.tensor_traffic import gathered_input, loss_work
from megatron_zpp.parallel.link_work import NO_LINK_WORK, LinkWork, LinkWorkOfUses


def tensor_work(shape: ModelShape, *, samples: int, element_bytes: int) -> LinkWorkOfUses:
    """The work of embedding, blocks and final, in this order, of one rank for a micro-batch of `samples` samples."""
    if shape.tensor_ranks == 1:
        return NO_LINK_WORK
    layer = LayerWork.of(shape, samples=samples, element_bytes=element_bytes)
    again = {index: layer.block_again(ends_chunk=index == chunk[-1]) for chunk in recomputed_chunks(shape.config) for index in chunk}
    for index, work in _gathered_inputs(shape, samples, element_bytes):
        again[index] += work
    blocks = range(shape.config.num_layers)
    return LinkWorkOfUses(
        (layer.out_of, *(layer.block for _ in blocks), layer.into + loss_work(shape, samples=samples)),
        (layer.out_of_backward, *(layer.block_backward + again.get(index, LinkWork()) for index in blocks), layer.final_backward),
    )


def _gathered_inputs(shape: ModelShape, samples: int, element_bytes: int) -> Iterator[tuple[int, LinkWork]]:
    """The gathers of inputs of recomputed chunks, each with the block in whose backward it starts."""
    gather = gathered_input(shape, samples=samples, element_bytes=element_bytes)
    chunks = recomputed_chunks(shape.config)
    if not gather.collectives or not chunks:
        return
    yield chunks[-1][-1], LinkWork(gather.nbytes, collectives=1)
    for after in chunks[1:]:
        yield after[-1], LinkWork(overlapped_bytes=gather.nbytes, collectives=1)
