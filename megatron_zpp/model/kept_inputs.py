"""How many inputs of recomputed chunks a rank keeps, and how large they are, from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.comm.tensor_link import padded_part_numel
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks


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
