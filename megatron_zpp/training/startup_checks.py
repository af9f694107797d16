"""Checks of a run before its parts are built: flags, kernels, backends, memory, folders."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_zpp.checkpoint.durable import SHARED_FOLDER, is_seen
from megatron_zpp.config.data_sources import read_sources
from megatron_zpp.config.flag import any_of, spelling_of
from megatron_zpp.config.options import arguments, options
from megatron_zpp.config.schema import Config
from megatron_zpp.model.attention_kernel import check_attention, head_shape_of
from megatron_zpp.model.compilation import check_compilation
from megatron_zpp.model.document_attention import has_varlen
from megatron_zpp.model.gpt import GPT
from megatron_zpp.monitor.available_memory import bytes_for_rank
from megatron_zpp.ops import extension
from megatron_zpp.ops.apex import check_apex
from megatron_zpp.parallel.initialize import StartupError, World, gather_texts
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.training.memory_need import MemoryThere, check_fits
from megatron_zpp.training.setup import working_dtype
from megatron_zpp.training.sharding import sharding_of

# With these settings cuBLAS documents the same bits every time.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
# Paths may be spelled differently on different machines.
FLAGS_THAT_MAY_DIFFER = {"local_rank", *(option.name for option in options() if option.flag.unit == "path")}


def check_same_flags(config: Config) -> None:
    """Nothing, where every rank was started with the same flags, paths aside; every rank must call it.

    Raises StartupError naming the flags that differ, on every rank alike.
    """
    own = {name: value for name, value in arguments(config).items() if name not in FLAGS_THAT_MAY_DIFFER}
    own["data_path"] = _shares_in_words(config)
    by_rank = [json.loads(text) for text in gather_texts(json.dumps(own))]
    for rank, theirs in enumerate(by_rank):
        differing = [
            f"{spelling_of(name)} {by_rank[0][name]} on rank 0 and {theirs[name]} on rank {rank}"
            for name in own
            if theirs[name] != by_rank[0][name]
        ]
        if differing:
            raise StartupError(f"the ranks were started with different flags: {'; '.join(differing)}; give every rank the same.")


def _shares_in_words(config: Config) -> str:
    """The number of corpora and their weights, which must not differ where paths may; of each split with corpora of its own."""
    sources = read_sources(config.data)
    blends = {"": sources.common} if sources.common is not None else sources.by_split
    words = (f"{split} {len(blend.prefixes)} corpora of weights {blend.weights}" for split, blend in blends.items() if blend is not None)
    return ", ".join(words).strip()


def use_deterministic_kernels() -> None:
    """Lets torch run only kernels that give the same bits every time. Must come before the first matrix product.

    NCCL_ALGO does not matter, as no collective adds: ranks exchange payloads and add them in rank order. Raises ValueError where the
    environment asks cuBLAS for what it cannot do twice the same way.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACES[0])
    if workspace not in DETERMINISTIC_WORKSPACES:
        raise ValueError(
            f"--deterministic-mode does not go with CUBLAS_WORKSPACE_CONFIG={workspace} in the environment; "
            f"choose {any_of(DETERMINISTIC_WORKSPACES)}, or leave it unset."
        )
    torch.use_deterministic_algorithms(True)
    # Nothing is read before it is written, so filling it with NaN would only cost time. torch's stubs lack the setting.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_backends(config: Config, device: torch.device) -> None:
    """Nothing, where NVIDIA Apex, the kernels of attention and a compiler are there as far as flags ask for them.

    Must come before the model and the engine.
    """
    if config.optimizer.optimizer_backend == "apex":
        check_apex("--optimizer-backend", "amp_C", device.type)
    if config.model.norm_backend == "apex":
        check_apex("--norm-backend", "fused_layer_norm_cuda", device.type)
    head = head_shape_of(config.model, working_dtype(config.precision))
    check_attention(device, head, masks_documents=config.data.reset_attention_mask and not has_varlen(device, head))
    if config.training.compile:
        check_compilation(device)


def prepare_kernels(config: Config, device: torch.device) -> str:
    """Loads the quantization kernels where a run quantizes, and says what it runs on; an empty string where nothing is quantized."""
    if not (config.zero.zero_quantized_weights or config.zero.zero_quantized_gradients):
        return ""
    extension.load()
    return extension.report(device.type)


def memory_per_rank(world: World, hosts: Sequence[str]) -> MemoryThere:
    """What every rank may use; every rank must call it.

    hosts: the host name of every rank, in rank order.
    """
    ranks_on_host = hosts.count(hosts[world.rank])
    own = [bytes_for_rank(device, ranks_on_host) for device in (world.device, torch.device("cpu"))]
    by_rank = [json.loads(text) for text in gather_texts(json.dumps(own))]
    device, host = (min((nbytes for nbytes in kind if nbytes is not None), default=None) for kind in zip(*by_rank, strict=True))
    return MemoryThere(device, host)


def check_memory(config: Config, model: GPT, topology: Topology, device: torch.device, there: MemoryThere) -> None:
    """Nothing, where the run fits in the memory of every rank. Must come before the engine, which allocates."""
    check_fits(config, model, sharding_of(config), topology, is_on_gpu=device.type == "cuda", there=there)


def check_save_is_shared(config: Config, world: World) -> None:
    """Nothing, where every rank sees in the folder of --save what rank 0 puts there; every rank must call it.

    Raises StartupError on every rank alike: better known now than at the first save.
    """
    if config.checkpoint.save is None or world.world_size == 1:
        return
    folder = Path(config.checkpoint.save)
    probe = folder / f".probe_of_run_{gather_texts(secrets.token_hex(4))[0]}"
    if world.rank == 0:
        probe.touch()
    gather_texts("made")
    try:
        with world.agreement():
            if not is_seen(probe):
                raise ValueError(f"--save {folder} on this rank's machine is not the folder that rank 0 sees; {SHARED_FOLDER}")
    finally:
        if world.rank == 0:
            probe.unlink()


def check_writable(flag: str, folder: Path, rank: int) -> None:
    """Nothing, where this rank can make the folder and write in it; better known now than at the first save."""
    probe = folder / f".probe_of_rank_{rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{flag} {folder} cannot be written to ({error.strerror}); choose a folder that every rank can write to."
        ) from error
