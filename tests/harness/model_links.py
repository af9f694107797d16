"""What one rank receives of a micro-batch over the links of the model, by closed forms.

X = bytes of the hidden states of a micro-batch, T tensor ranks, r = (T - 1) / T. Over the tensor link a gather of hidden states brings r X
to a rank, a sum of which every rank gets its part r X, and a sum that every rank gets whole 2 r X, in two collectives:

                             forward    backward   recomputed
    embedding                2 r X      -
    a block                  4 r X      4 r X      4 r X
    final norm and head      -          2 r X
    with --sequence-parallel
    embedding                r X        r X
    a block                  4 r X      6 r X      4 r X
    final norm and head      r X        r X

The last sum of a recomputed chunk is not repeated. The loss gathers three fp32 numbers per token. With --partition-activations, and without
--sequence-parallel, backward gathers the input of every chunk: r X.

Over the context link attention exchanges queries, keys and values of the own tokens, and its outputs, in forward, in backward and in
recomputation of a whole block.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.schema import Config
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.parallel.grid import Grid


@dataclass(frozen=True)
class Crossing:
    """Bytes that one rank receives, and collectives."""

    nbytes: int = 0
    collectives: int = 0

    def __add__(self, other: Crossing) -> Crossing:
        return Crossing(self.nbytes + other.nbytes, self.collectives + other.collectives)

    def __rmul__(self, times: int) -> Crossing:
        return Crossing(times * self.nbytes, times * self.collectives)


def _sizes(config: Config) -> tuple[int, int]:
    """Tokens of a micro-batch, and bytes of an activation."""
    is_half = config.precision.bf16 or config.precision.fp16
    return config.training.micro_batch_size * config.model.seq_length, 2 if is_half else 4


def tensor_link(config: Config, grid: Grid) -> tuple[Crossing, Crossing]:
    """In forward, and in forward and backward together, of a rank that has all tokens of a sample."""
    model, ranks, is_divided = config.model, grid.tensor_ranks, config.distributed.sequence_parallel
    if ranks == 1:
        return Crossing(), Crossing()
    tokens, element_bytes = (size // by for size, by in zip(_sizes(config), (grid.context_ranks, 1), strict=True))
    step = ranks * 16 // element_bytes  # each rank's part is a whole number of 16 bytes
    part = -(-tokens * model.hidden_size // step) * step // ranks * element_bytes
    one = Crossing((ranks - 1) * part, 1)  # r X
    chunk_tokens = model.loss_chunk_tokens
    loss = Crossing((ranks - 1) * 3 * 4 * tokens, -(-tokens // chunk_tokens) if chunk_tokens else 1)
    forward = (4 * model.num_layers + 2) * one + loss
    chunks = recomputed_chunks(model)
    backward = ((6 if is_divided else 4) * model.num_layers + 2) * one
    again = (4 * sum(map(len, chunks)) - (1 if is_divided else 2) * len(chunks)) * one
    inputs = len(chunks) * one if model.partition_activations and not is_divided else Crossing()
    return forward, forward + backward + again + inputs


def context_link(config: Config, grid: Grid) -> tuple[Crossing, Crossing]:
    """In forward, and in forward and backward together.

    A rank receives the parts of C - 1 others: n / C tokens of A / C channels of queries, as many of outputs, and the keys and values of
    K / C heads, or of one that several ranks get.
    """
    model, ranks = config.model, grid.context_ranks
    if ranks == 1:
        return Crossing(), Crossing()
    tokens, element_bytes = _sizes(config)
    key_heads = max(1, max(1, model.key_value_heads // grid.tensor_ranks) // ranks)
    queries = model.heads_width // grid.tensor_ranks // ranks
    channels = 2 * queries + 2 * key_heads * model.kv_channels
    block = Crossing((ranks - 1) * tokens // ranks * channels * element_bytes, 2)
    forward, recomputed = model.num_layers * block, sum(map(len, recomputed_chunks(model)))
    return forward, 2 * forward + recomputed * block
