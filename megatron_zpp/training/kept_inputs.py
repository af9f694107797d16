"""Makes what keeps the inputs of recomputed chunks, as the flags ask for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_zpp.comm.kept_places import NewPlaces, make_places
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.tensor_link import padded_part_numel
from megatron_zpp.config.schema import Config, ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.tensor_parallel.kept_inputs import KeptInputs


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


def build_kept_inputs(config: Config, dtype: torch.dtype, links: Links) -> KeptInputs | None:
    """Allocates its memory, if it is to last. Returns None if the graph of autograd keeps the inputs. dtype: of activations."""
    model, grid = config.model, links.grid
    shape = kept_inputs_shape(
        model,
        config.training.micro_batch_size,
        grid.tensor_ranks,
        sequence_parallel=config.distributed.sequence_parallel,
        context_ranks=grid.context_ranks,
    )
    if shape.chunks == 0:
        return None
    link = links.tensor_link if shape.ranks > 1 else None
    if model.checkpoint_in_cpu or model.contiguous_checkpointing:
        places = make_places(
            shape.chunks,
            shape.part_numel(dtype.itemsize),
            dtype,
            links.device,
            streams=links.streams,
            on_host=model.checkpoint_in_cpu,
        )
        return KeptInputs(places, link)
    return None if link is None else KeptInputs(NewPlaces(), link)


def about_kept_inputs(config: Config, device: torch.device) -> str:
    """A line about --checkpoint-in-cpu where it moves nothing; otherwise empty."""
    if not config.model.checkpoint_in_cpu or device.type == "cuda":
        return ""
    return "--checkpoint-in-cpu: this device is the host, so nothing is moved; inputs are kept in memory that is allocated once"
