"""What each use of a GPT exchanges over the tensor link, and what of it runs beside computation (pure arithmetic, no torch).

model/tensor_traffic.py has the bytes of all uses together. Of these, backward of a layer that divides its rows does not wait for

    without --sequence-parallel    the exchange of its sum, which runs beside the gradient of the weight; the gather follows
    with it                        the gather of its input, beside the gradient of that input, and the exchange of this gradient, beside the
                                   gradient of the weight

With --partition-activations the gather of a chunk's input runs beside the first products of the chunk after it, and backward waits for
that of the last chunk.
The sum of the head's input gradient has nothing beside it: with the loss in chunks, all gradients of the head are computed before.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zpp.comm.tensor_bytes import gathered_bytes, summed_bytes
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.model.tensor_traffic import gathered_input, tensor_traffic
from megatron_zpp.parallel.tensor_work import NO_TENSOR_WORK, TensorWork, TensorWorkOfUses


def tensor_work(shape: ModelShape, *, samples: int, element_bytes: int) -> TensorWorkOfUses:
    """The work of embedding, blocks and final, in this order, of one rank for a micro-batch of `samples` samples."""
    config, ranks = shape.config, shape.tensor_ranks
    if ranks == 1:
        return NO_TENSOR_WORK
    tokens = samples * config.seq_length
    numel = tokens * config.hidden_size
    of_loss = tensor_traffic(shape, microbatches=1, samples=samples, element_bytes=element_bytes).loss
    loss = TensorWork(of_loss.nbytes, collectives=of_loss.collectives)
    if shape.sequence_parallel:
        moved = gathered_bytes(numel * element_bytes // ranks, ranks)  # by an exchange as well
        once, beside = TensorWork(moved, collectives=1), TensorWork(overlapped_bytes=moved, collectives=1)
        into, into_backward, out_of, out_of_backward, final_backward = once, beside + beside, once, once, once
    else:
        moved = summed_bytes(numel, ranks, element_bytes) // 2
        into, out_of, out_of_backward = TensorWork(), TensorWork(2 * moved, collectives=2), TensorWork()
        into_backward, final_backward = TensorWork(moved, moved, 2), TensorWork(2 * moved, collectives=2)
    block, of_block = 2 * (into + out_of), 2 * (into_backward + out_of_backward)
    # Recomputation of a chunk ends before its last sum, which backward does not need.
    again = {index: block if index != chunk[-1] else 2 * into + out_of for chunk in recomputed_chunks(config) for index in chunk}
    for index, work in _gathered_inputs(shape, samples, element_bytes):
        again[index] += work
    blocks = range(config.num_layers)
    return TensorWorkOfUses(
        (out_of, *(block for _ in blocks), into + loss),
        (out_of_backward, *(of_block + again.get(index, TensorWork()) for index in blocks), final_backward),
    )


def _gathered_inputs(shape: ModelShape, samples: int, element_bytes: int) -> Iterator[tuple[int, TensorWork]]:
    """The gathers of inputs of recomputed chunks, each with the block in whose backward it starts."""
    gather = gathered_input(shape, samples=samples, element_bytes=element_bytes)
    chunks = recomputed_chunks(shape.config)
    if not gather.collectives or not chunks:
        return
    yield chunks[-1][-1], TensorWork(gather.nbytes, collectives=1)
    for after in chunks[1:]:
        yield after[-1], TensorWork(overlapped_bytes=gather.nbytes, collectives=1)
