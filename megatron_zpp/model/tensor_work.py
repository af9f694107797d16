"""The bytes that one rank receives over the tensor link for activations and their gradients (pure arithmetic, no torch).

X = bytes of the hidden states of a micro-batch, T tensor ranks, r = (T - 1) / T. A gather of hidden states brings r X to a rank, a sum of
which every rank gets its part brings r X, and a sum that every rank gets whole 2 r X. Without padding, per micro-batch:

                             forward    backward   recomputed
    embedding                2 r X      -
    a block                  4 r X      4 r X      4 r X
    final norm and head      -          2 r X
    with --sequence-parallel
    embedding                r X        r X
    a block                  4 r X      6 r X      4 r X
    final norm and head      r X        r X

Every one of a block's four linear layers crosses the link in forward or in backward, as model/divisions.py divides them. With
--sequence-parallel, backward gathers the input of a layer that divides its rows again, because forward has kept the own tokens only. A
recomputation ends with the last activation that backward needs, so the last sum of a chunk of blocks is not repeated: nothing behind it
keeps an activation, dropout neither.
The loss gathers three fp32 numbers per token. With --partition-activations, and without --sequence-parallel, backward gathers the input of
every chunk: r X. It does so beside the first products of the chunk after it, and waits for that of the last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zpp.comm.tensor_bytes import gathered_bytes
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.kept_need import kept_inputs_shape
from megatron_zpp.model.layer_work import LayerWork
from megatron_zpp.model.loss_chunks import has_chunks, ranges
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.link_work import NO_LINK_WORK, LinkWork, LinkWorkOfUses

LOSS_BYTES = 3 * 4  # per token: the largest logit, the sum of exponentials, the logit of the label


def tensor_work(shape: ModelShape, *, samples: int, element_bytes: int) -> LinkWorkOfUses:
    """The work of embedding, blocks and final, in this order, of one rank for a micro-batch of `samples` samples.

    element_bytes: of an activation.
    """
    if shape.tensor_ranks == 1:
        return NO_LINK_WORK
    layer = LayerWork.of(shape, samples=samples, element_bytes=element_bytes)
    again = {index: layer.block_again(ends_chunk=index == chunk[-1]) for chunk in recomputed_chunks(shape.config) for index in chunk}
    for index, work in _gathered_inputs(shape, samples, element_bytes):
        again[index] += work
    blocks = range(shape.config.num_layers)
    return LinkWorkOfUses(
        (layer.out_of, *(layer.block for _ in blocks), layer.into + _loss_work(shape, samples)),
        (layer.out_of_backward, *(layer.block_backward + again.get(index, LinkWork()) for index in blocks), layer.final_backward),
    )


def _loss_work(shape: ModelShape, samples: int) -> LinkWork:
    """The work of the loss for a micro-batch: one gather, or one for each chunk of tokens."""
    tokens, chunk_tokens = samples * shape.config.seq_length, shape.config.loss_chunk_tokens
    gathers = len(list(ranges(tokens, chunk_tokens))) if has_chunks(tokens, chunk_tokens) else 1
    return LinkWork(gathered_bytes(LOSS_BYTES * tokens, shape.tensor_ranks), collectives=gathers)


def _gathered_inputs(shape: ModelShape, samples: int, element_bytes: int) -> Iterator[tuple[int, LinkWork]]:
    """The gathers of inputs of recomputed chunks, each with the block in whose backward it starts."""
    kept = kept_inputs_shape(shape.config, samples, shape.tensor_ranks, sequence_parallel=shape.sequence_parallel)
    chunks = recomputed_chunks(shape.config)
    if kept.ranks == 1 or not chunks:
        return
    nbytes = gathered_bytes(kept.part_numel(element_bytes) * element_bytes, kept.ranks)
    yield chunks[-1][-1], LinkWork(nbytes, collectives=1)
    for after in chunks[1:]:
        yield after[-1], LinkWork(overlapped_bytes=nbytes, collectives=1)
