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

from megatron_zpp.comm.tensor_bytes import gathered_bytes, sum_scattered_bytes, summed_bytes
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.kept_need import kept_inputs_shape
from megatron_zpp.model.loss_chunks import has_chunks, ranges
from megatron_zpp.model.shapes import ModelShape

LOSS_BYTES = 3 * 4  # per token: the largest logit, the sum of exponentials, the logit of the label


@dataclass(frozen=True)
class Crossing:
    """Bytes that arrive at one rank, and the collectives that bring them."""

    nbytes: int = 0
    collectives: int = 0

    def __add__(self, other: Crossing) -> Crossing:
        return Crossing(self.nbytes + other.nbytes, self.collectives + other.collectives)

    def __mul__(self, times: int) -> Crossing:
        return Crossing(self.nbytes * times, self.collectives * times)


@dataclass(frozen=True)
class TensorTraffic:
    """What one rank receives in micro-batches.

    forward: without the loss. recomputed: in backward, of blocks that are recomputed. inputs: of these blocks, if ranks keep parts of them.
    """

    forward: Crossing = Crossing()
    backward: Crossing = Crossing()
    recomputed: Crossing = Crossing()
    loss: Crossing = Crossing()
    inputs: Crossing = Crossing()

    @property
    def training(self) -> Crossing:
        """Of a step, without elements that several ranks hold."""
        return self.forward + self.backward + self.recomputed + self.loss + self.inputs

    @property
    def evaluation(self) -> Crossing:
        """Of as many micro-batches that are only evaluated."""
        return self.forward + self.loss


def tensor_traffic(shape: ModelShape, *, microbatches: int, samples: int, element_bytes: int) -> TensorTraffic:
    """The traffic of a model's rank in `microbatches` micro-batches of `samples` samples. element_bytes: of an activation."""
    if shape.tensor_ranks == 1:
        return TensorTraffic()
    layers = _Layers.with_sequence_parallel if shape.sequence_parallel else _Layers.without_sequence_parallel
    tokens = samples * shape.config.seq_length
    one = layers(tokens * shape.config.hidden_size, shape.tensor_ranks, element_bytes).traffic(shape.config)
    loss = _loss(shape.config, tokens, shape.tensor_ranks)
    inputs = gathered_input(shape, samples=samples, element_bytes=element_bytes) * len(recomputed_chunks(shape.config))
    return TensorTraffic(*(part * microbatches for part in (one.forward, one.backward, one.recomputed, loss, inputs)))


def gathered_input(shape: ModelShape, *, samples: int, element_bytes: int) -> Crossing:
    """The gather of one recomputed chunk's input; empty if every rank keeps its own."""
    kept = kept_inputs_shape(shape.config, samples, shape.tensor_ranks, sequence_parallel=shape.sequence_parallel)
    if kept.ranks == 1:
        return Crossing()
    return Crossing(gathered_bytes(kept.part_numel(element_bytes) * element_bytes, kept.ranks), 1)


def replica_bytes(shared_numel: int, tensor_ranks: int) -> int:
    """What one rank receives in a step to make equal the gradients that several ranks hold, in fp32.

    shared_numel: of such elements, in the slices of the rung on which the optimizer works.
    """
    return gathered_bytes(4 * shared_numel, tensor_ranks)


@dataclass(frozen=True)
class _Layers:
    """The crossings of one micro-batch.

    into: from hidden states to a layer that divides its rows; out_of: from a layer that divides its columns to hidden states. Both have
    a backward.
    """

    into: Crossing
    into_backward: Crossing
    out_of: Crossing
    out_of_backward: Crossing
    final_backward: Crossing

    @classmethod
    def without_sequence_parallel(cls, numel: int, ranks: int, element_bytes: int) -> _Layers:
        """numel: of the hidden states of all tokens."""
        whole_sum = Crossing(summed_bytes(numel, ranks, element_bytes), 2)
        return cls(Crossing(), whole_sum, whole_sum, Crossing(), whole_sum)

    @classmethod
    def with_sequence_parallel(cls, numel: int, ranks: int, element_bytes: int) -> _Layers:
        """numel: of the hidden states of all tokens."""
        nbytes = numel * element_bytes
        gather, part = Crossing(gathered_bytes(nbytes // ranks, ranks), 1), Crossing(sum_scattered_bytes(nbytes, ranks), 1)
        return cls(gather, gather + part, part, gather, part)

    def traffic(self, config: ModelConfig) -> TensorTraffic:
        """Without the loss."""
        blocks, layers_of_block = config.num_layers, 2  # of each kind: qkv and up divide their rows, projection and down their columns
        forward = (self.into + self.out_of) * (layers_of_block * blocks) + self.out_of + self.into
        backward = (self.into_backward + self.out_of_backward) * (layers_of_block * blocks) + self.out_of_backward + self.final_backward
        return TensorTraffic(forward, backward, self._recomputed(config))

    def _recomputed(self, config: ModelConfig) -> Crossing:
        total = Crossing()
        for chunk in recomputed_chunks(config):
            total += self.into * (2 * len(chunk)) + self.out_of * (2 * len(chunk) - 1)
        return total


def _loss(config: ModelConfig, tokens: int, ranks: int) -> Crossing:
    """One gather, or one for each chunk of tokens."""
    chunk_tokens = config.loss_chunk_tokens
    gathers = len(list(ranges(tokens, chunk_tokens))) if has_chunks(tokens, chunk_tokens) else 1
    return Crossing(gathered_bytes(LOSS_BYTES * tokens, ranks), gathers)
