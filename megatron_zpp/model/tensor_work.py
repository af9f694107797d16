"""What each use of a GPT exchanges over the tensor link, from the configuration alone (no torch).

X: bytes of the hidden states of a micro-batch. r = (T - 1) / T, so that a rank receives r X for each exchange and for each gather of X.

                without --sequence-parallel                       with it
    block       forward: two sums, each an exchange and a         forward: two gathers of tokens, two exchanges
                gather
                backward: two sums of input gradients, whose      backward: two gathers of output gradients; beside products, two
                exchanges run beside products                     gathers of inputs and two exchanges of input gradients
    embedding   forward: a sum                                    forward: an exchange; backward: a gather
    final       backward: a sum of input gradients                forward: a gather; backward: an exchange beside products
                forward: 3 fp32 values of each token from every rank, for the loss
"""

from __future__ import annotations

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.parallel.tensor_work import NO_TENSOR_WORK, TensorWork, TensorWorkOfUses

LOSS_BYTES = 3 * 4  # of a token: largest logit, sum of exponentials, logit of the label


def tensor_work(
    config: ModelConfig, micro_batch_size: int, element_bytes: int, *, tensor_ranks: int, sequence_parallel: bool
) -> TensorWorkOfUses:
    """The work of embedding, blocks and final, in this order, of one rank for one micro-batch."""
    if tensor_ranks == 1:
        return NO_TENSOR_WORK
    tokens = micro_batch_size * config.seq_length
    moved = (tensor_ranks - 1) * (-(-tokens * config.hidden_size // tensor_ranks)) * element_bytes  # of an exchange, or of a gather
    loss = TensorWork((tensor_ranks - 1) * LOSS_BYTES * tokens, collectives=1)
    again = _repeated(config, moved, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        ends = (TensorWork(moved, collectives=1), TensorWork(moved, collectives=1), TensorWork(overlapped_bytes=moved, collectives=1))
        embedding, of_embedding, of_final = ends
        final, of_block = TensorWork(moved, collectives=1) + loss, TensorWork(2 * moved, 4 * moved, 6)
    else:
        embedding, of_embedding, of_final = TensorWork(2 * moved, collectives=2), TensorWork(), TensorWork(moved, moved, 2)
        final, of_block = loss, TensorWork(2 * moved, 2 * moved, 4)
    block = TensorWork(4 * moved, collectives=4)
    blocks = range(config.num_layers)
    return TensorWorkOfUses(
        (embedding, *(block for _ in blocks), final),
        (of_embedding, *(of_block + again.get(index, TensorWork()) for index in blocks), of_final),
    )


def _repeated(config: ModelConfig, moved: int, *, sequence_parallel: bool) -> dict[int, TensorWork]:
    """What the backward of each recomputed block repeats of its forward.

    Recomputation ends with the last tensor that backward needs. So the last sum of a chunk is repeated only if hidden dropout follows it.
    """
    repeats_all = config.hidden_dropout > 0
    last_sum = 1 if sequence_parallel else 2
    works = {}
    for chunk in recomputed_chunks(config):
        for index in chunk:
            times = 4 if repeats_all or index != chunk[-1] else 4 - last_sum
            works[index] = TensorWork(times * moved, collectives=times)
    return works
