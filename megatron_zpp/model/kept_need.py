"""Memory for the inputs of recomputed chunks, from the configuration alone (no torch).

I bytes of the inputs of all chunks, each the hidden states of a micro-batch on one rank between two layers. T tensor ranks, among which
--partition-activations divides an input (otherwise 1). Parts are whole numbers of 16 bytes.

                                    micro-batch    from the start    host
    none of the flags               I
    --partition-activations         I / T
    --contiguous-checkpointing                     I / T
    --checkpoint-in-cpu                                              I / T, pinned

Beside them there are whole inputs in backward, at most two: that of the chunk which is recomputed, and that of the next one, on its way.
If they are divided and on the host, there are also two parts on their way. On a device that has the memory of its host,
--checkpoint-in-cpu is --contiguous-checkpointing.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.comm.tensor_bytes import padded_part_numel
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks

MOST_AT_ONCE = 2


@dataclass(frozen=True)
class KeptNeed:
    """Bytes of kept inputs. passing: of a micro-batch; lasting: on the device from start to end; staging: in backward; host: pinned."""

    passing: int = 0
    lasting: int = 0
    staging: int = 0
    host: int = 0


NOTHING_KEPT = KeptNeed()


@dataclass(frozen=True)
class KeptInputsShape:
    """What one rank keeps of the input of each chunk.

    chunks: the number of inputs. numel: of a whole one. ranks: those that have a part of it each; 1 if this rank keeps it whole.
    """

    chunks: int
    numel: int
    ranks: int

    def part_numel(self, element_bytes: int) -> int:
        """Elements that the rank keeps of one input."""
        return self.numel if self.ranks == 1 else padded_part_numel(self.numel, self.ranks, element_bytes)


def kept_inputs_shape(
    config: ModelConfig, samples: int, tensor_ranks: int, *, sequence_parallel: bool, context_ranks: int = 1
) -> KeptInputsShape:
    """What one rank keeps of a micro-batch of `samples` samples."""
    numel = samples * (config.seq_length // context_ranks) * config.hidden_size
    if sequence_parallel:
        return KeptInputsShape(len(recomputed_chunks(config)), numel // tensor_ranks, 1)
    return KeptInputsShape(len(recomputed_chunks(config)), numel, tensor_ranks if config.partition_activations else 1)


def kept_need(config: ModelConfig, shape: KeptInputsShape, element_bytes: int, *, has_host: bool) -> KeptNeed:
    """The memory that one rank needs. has_host: the host of the device has memory of its own."""
    if shape.chunks == 0:
        return NOTHING_KEPT
    part, whole = shape.part_numel(element_bytes) * element_bytes, shape.numel * element_bytes
    kept, at_once = shape.chunks * part, min(MOST_AT_ONCE, shape.chunks)
    whole_inputs = at_once * whole
    if config.checkpoint_in_cpu and has_host:
        return KeptNeed(staging=whole_inputs + (at_once * part if shape.ranks > 1 else 0), host=kept)
    staging = whole_inputs if shape.ranks > 1 else 0
    if config.checkpoint_in_cpu or config.contiguous_checkpointing:
        return KeptNeed(lasting=kept, staging=staging)
    return KeptNeed(passing=kept, staging=staging)
