"""Makes what keeps the inputs of recomputed chunks, as the flags ask for."""

from __future__ import annotations

import torch

from megatron_zpp.comm.kept_places import NewPlaces, make_places
from megatron_zpp.comm.links import Ladder
from megatron_zpp.config.schema import Config
from megatron_zpp.model.kept_inputs import kept_inputs_shape
from megatron_zpp.tensor_parallel.kept_inputs import KeptInputs


def build_kept_inputs(config: Config, dtype: torch.dtype, ladder: Ladder) -> KeptInputs | None:
    """Allocates its memory, if it is to last. Returns None if the graph of autograd keeps the inputs. dtype: of activations."""
    model, grid = config.model, ladder.grid
    shape = kept_inputs_shape(
        model,
        config.training.micro_batch_size,
        grid.tensor_ranks,
        sequence_parallel=config.distributed.sequence_parallel,
        context_ranks=grid.context_ranks,
    )
    if shape.chunks == 0:
        return None
    link = ladder.tensor_link if shape.ranks > 1 else None
    if model.checkpoint_in_cpu or model.contiguous_checkpointing:
        places = make_places(
            shape.chunks,
            shape.part_numel(dtype.itemsize),
            dtype,
            ladder.device,
            streams=ladder.streams,
            on_host=model.checkpoint_in_cpu,
        )
        return KeptInputs(places, link)
    return None if link is None else KeptInputs(NewPlaces(), link)


def about_kept_inputs(config: Config, device: torch.device) -> str:
    """A line about --checkpoint-in-cpu where it moves nothing; otherwise empty."""
    if not config.model.checkpoint_in_cpu or device.type == "cuda":
        return ""
    return "--checkpoint-in-cpu: this device is the host, so nothing is moved; inputs are kept in memory that is allocated once"
