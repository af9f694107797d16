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
every chunk: r X.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.comm.tensor_bytes import gathered_bytes
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.kept_need import kept_inputs_shape
from megatron_zpp.model.layer_work import LayerWork
from megatron_zpp.model.loss_chunks import has_chunks, ranges
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.link_work import LinkWork

NO_WORK = LinkWork()
LOSS_BYTES = 3 * 4  # per token: the largest logit, the sum of exponentials, the logit of the label


@dataclass(frozen=True)
class TensorTraffic:
    """What one rank receives in micro-batches.

    forward: without the loss. recomputed: in backward, of blocks that are recomputed. inputs: of these blocks, if ranks keep parts of them.
    """

    forward: LinkWork = NO_WORK
    backward: LinkWork = NO_WORK
    recomputed: LinkWork = NO_WORK
    loss: LinkWork = NO_WORK
    inputs: LinkWork = NO_WORK

    @property
    def training(self) -> LinkWork:
        """Of a step, without elements that several ranks hold."""
        return self.forward + self.backward + self.recomputed + self.loss + self.inputs

    @property
    def evaluation(self) -> LinkWork:
        """Of as many micro-batches that are only evaluated."""
        return self.forward + self.loss


def tensor_traffic(shape: ModelShape, *, microbatches: int, samples: int, element_bytes: int) -> TensorTraffic:
    """The traffic of a model's rank in `microbatches` micro-batches of `samples` samples. element_bytes: of an activation."""
    if shape.tensor_ranks == 1:
        return TensorTraffic()
    config, layer = shape.config, LayerWork.of(shape, samples=samples, element_bytes=element_bytes)
    return TensorTraffic(
        microbatches * (config.num_layers * layer.block + layer.out_of + layer.into),
        microbatches * (config.num_layers * layer.block_backward + layer.out_of_backward + layer.final_backward),
        microbatches * _recomputed(config, layer),
        microbatches * loss_work(shape, samples=samples),
        microbatches * len(recomputed_chunks(config)) * gathered_input(shape, samples=samples, element_bytes=element_bytes),
    )


def gathered_input(shape: ModelShape, *, samples: int, element_bytes: int) -> LinkWork:
    """The gather of one recomputed chunk's input; empty if every rank keeps its own."""
    kept = kept_inputs_shape(shape.config, samples, shape.tensor_ranks, sequence_parallel=shape.sequence_parallel)
    if kept.ranks == 1:
        return LinkWork()
    return LinkWork(gathered_bytes(kept.part_numel(element_bytes) * element_bytes, kept.ranks), collectives=1)


def loss_work(shape: ModelShape, *, samples: int) -> LinkWork:
    """The work of the loss for a micro-batch: one gather, or one for each chunk of tokens."""
    tokens, chunk_tokens = samples * shape.config.seq_length, shape.config.loss_chunk_tokens
    gathers = len(list(ranges(tokens, chunk_tokens))) if has_chunks(tokens, chunk_tokens) else 1
    return LinkWork(gathered_bytes(LOSS_BYTES * tokens, shape.tensor_ranks), collectives=gathers)


def _recomputed(config: ModelConfig, layer: LayerWork) -> LinkWork:
    total = LinkWork()
    for chunk in recomputed_chunks(config):
        total += (len(chunk) - 1) * layer.block_again(ends_chunk=False) + layer.block_again(ends_chunk=True)
    return total
