"""Checks before a run trains: flags, backends, memory, folders."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_zpp import __version__
from megatron_zpp.checkpoint.disk import Disk
from megatron_zpp.checkpoint.durable import SHARED_FOLDER, becomes_visible
from megatron_zpp.config.counted import counted
from megatron_zpp.config.data_sources import read_sources
from megatron_zpp.config.flag import any_of, spelling_of
from megatron_zpp.config.options import arguments, options
from megatron_zpp.config.schema import Config
from megatron_zpp.model.attention_kernel import check_attention, head_shape_of
from megatron_zpp.model.compilation import check_compilation
from megatron_zpp.model.document_attention import has_varlen
from megatron_zpp.monitor.available_memory import bytes_for_rank
from megatron_zpp.ops.apex import check_apex
from megatron_zpp.ops.build import processor_features
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.initialize import StartupError, World
from megatron_zpp.parallel.ranks_in_words import first_of, ranks_in_words
from megatron_zpp.system.output_file import create_new, remedy_for
from megatron_zpp.system.owner import own_token
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.memory_check import AvailableMemory, check_fits
from megatron_zpp.training.setup import working_dtype

VERSIONS, UNKNOWN = "versions", "unknown"
GPU_FILES, HIDDEN_GPUS = "nvidia[0-9]*", ("", "-1", "NoDevFiles")  # in /dev; values of CUDA_VISIBLE_DEVICES
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx_ne_convert")  # as Linux names them
# cuBLAS promises reproducible results for these values.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
OR_OF_NODES = ", or --node-local-checkpoints, with which each node saves on its own disk"
# They may be spelled differently on different machines. Where one is given ranks ask each other more, so all have it or none.
PATHS = {option.name for option in options() if option.flag.unit == "path"}


def check_same_flags(config: Config, world: World) -> None:
    """Raises StartupError on every rank if ranks were started with different flags or versions, and names them.

    Of paths only whether they are given must be the same. Every rank must call it. Builds of one version of torch, such as those for other
    versions of CUDA, are not told apart.
    """
    own = {**arguments(config), **{name: "given" if name in config.given else "not given" for name in PATHS}}
    own["data_path"] = _describe_blends(config)
    own[VERSIONS] = f"megatron_zpp {__version__} with torch {torch.__version__.partition('+')[0]}"
    by_rank = [json.loads(text) for text in world.gather_texts(json.dumps(own))]
    names = dict.fromkeys(name for theirs in by_rank for name in theirs)  # another version has other flags
    for rank, theirs in enumerate(by_rank):
        pairs = {name: (by_rank[0].get(name, UNKNOWN), theirs.get(name, UNKNOWN)) for name in names}
        differing = {name: f"{here} on rank 0 and {there} on rank {rank}" for name, (here, there) in pairs.items() if here != there}
        if VERSIONS in differing:
            raise StartupError(f"the ranks run different versions: {differing[VERSIONS]}; install the same for every rank.")
        if differing:
            words = "; ".join(f"{spelling_of(name)} {values}" for name, values in differing.items())
            raise StartupError(f"the ranks were started with different flags: {words}; give every rank the same.")


def _describe_blends(config: Config) -> str:
    """Number and weights of the corpora of each blend. Paths may differ between ranks, these may not."""
    words = (
        f"{split} {counted(len(blend.prefixes), 'corpus', 'corpora')} of weights {blend.weights}"
        for split, blend in read_sources(config.data).blends.items()
    )
    return ", ".join(words).strip()


def check_same_devices(world: World, hosts: Sequence[str]) -> None:
    """Raises StartupError on every rank if some ranks find a GPU and others none. Every rank must call it, before lanes are connected.

    Ranks on GPUs would wait in NCCL for the others, which wait in gloo. hosts: host name of every rank, in rank order.
    """
    kinds = world.gather_texts(world.device.type)
    lacking = [rank for rank, kind in enumerate(kinds) if kind == "cpu"]
    if 0 < len(lacking) < len(kinds):
        raise StartupError(
            f"no GPU is found by {ranks_in_words(lacking)} on {first_of(hosts[rank] for rank in lacking)}, and the other ranks have GPUs; "
            "see what nvidia-smi and torch.cuda.is_available() say there, or give every rank --distributed-backend gloo to train on CPUs."
        )


def about_device(config: Config, device: torch.device) -> str:
    """Warnings about the device of the run and its use, a line for each."""
    return "\n".join(filter(None, [about_unused_gpus(config, device), about_one_queue(device), about_slow_bf16(config, device)]))


def about_unused_gpus(config: Config, device: torch.device, devices: Path = Path("/dev")) -> str:
    """A warning if the run is on CPUs, this machine has GPUs of NVIDIA, and neither a flag nor the environment says that this is meant."""
    is_meant = config.distributed.distributed_backend == "gloo" or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN_GPUS
    if device.type != "cpu" or is_meant or not any(devices.glob(GPU_FILES)):
        return ""
    why = f"finds none with its CUDA {torch.version.cuda}, perhaps because the driver is too old" if torch.version.cuda else "has no CUDA"
    return (
        f"WARNING: the run is on CPUs although this machine has GPUs, because torch {torch.__version__} {why}; "
        "give --distributed-backend gloo if this is meant."
    )


def about_one_queue(device: torch.device) -> str:
    """A warning if the environment puts all streams of the GPU into one hardware queue, as scripts of Megatron-LM do."""
    if device.type != "cuda" or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return ""
    return (
        "WARNING: with CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment, messages wait for computation; "
        "unset it, ranks that share layers do not need it here."
    )


def about_slow_bf16(config: Config, device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A warning if the run is in bf16 on x86 processors that do not multiply it natively."""
    if device.type != "cpu" or working_dtype(config.precision) != torch.bfloat16:
        return ""
    features = processor_features(cpuinfo)
    if "flags" not in features or any(instructions in features for instructions in BF16_INSTRUCTIONS):
        return ""
    return (
        f"WARNING: this processor has no instructions for bf16 ({any_of(BF16_INSTRUCTIONS)}), so products in bf16 are slower than in fp32; "
        "leave --bf16 out for a faster run."
    )


def use_deterministic_kernels() -> None:
    """Restricts torch to deterministic kernels. Call it before the first matrix product.

    NCCL_ALGO does not matter, because no collective adds: ranks exchange payloads and add them in rank order. Raises UserError if
    CUBLAS_WORKSPACE_CONFIG in the environment has a value for which cuBLAS is not deterministic.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", DETERMINISTIC_WORKSPACES[0])
    if workspace not in DETERMINISTIC_WORKSPACES:
        raise UserError(
            f"--deterministic-mode does not go with CUBLAS_WORKSPACE_CONFIG={workspace} in the environment; "
            f"choose {any_of(DETERMINISTIC_WORKSPACES)}, or leave it unset."
        )
    torch.use_deterministic_algorithms(True)
    # No tensor is read before it is written, so filling it with NaN would only cost time. torch's stubs lack the setting.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_backends(config: Config, device: torch.device) -> None:
    """Raises UserError if NVIDIA Apex, a kernel of attention or a compiler is missing that the flags ask for.

    Call it before the model and the engine are built.
    """
    if config.optimizer.optimizer_backend == "apex":
        check_apex("--optimizer-backend", "amp_C", device.type)
    if config.model.norm_backend == "apex":
        check_apex("--norm-backend", "fused_layer_norm_cuda", device.type)
    distributed = config.distributed
    head_ranks = distributed.tensor_model_parallel_size * distributed.context_parallel_size
    head = head_shape_of(config.model, working_dtype(config.precision), head_ranks)
    check_attention(device, head, masks_documents=config.data.reset_attention_mask and not has_varlen(device, head))
    if config.training.compile:
        check_compilation(device)


def available_memory(world: World, hosts: Sequence[str]) -> AvailableMemory:
    """Memory that every rank may use. Every rank must call it, once its lanes are connected.

    hosts: host name of every rank, in rank order.
    """
    ranks_on_host = hosts.count(hosts[world.rank])
    own = [bytes_for_rank(device, ranks_on_host) for device in (world.device, torch.device("cpu"))]
    by_rank = [json.loads(text) for text in world.gather_texts(json.dumps(own))]
    device, host = (min((nbytes for nbytes in kind if nbytes is not None), default=None) for kind in zip(*by_rank, strict=True))
    return AvailableMemory(device, host, is_after_start=world.device.type == "cuda")


def check_memory(config: Config, padded_vocab_size: int, grid: Grid, world: World, available: AvailableMemory) -> None:
    """Raises StartupError on every rank if the run does not fit in the memory of each. Call it before the engine is built.

    Every rank must call it. Rank 0 plans for all, because every other rank would find the same.
    """
    mistake = ""
    if world.rank == 0:
        try:
            check_fits(config, padded_vocab_size, grid, is_on_gpu=world.device.type == "cuda", available=available)
        except UserError as error:
            mistake = str(error)
    mistake = world.gather_texts(mistake)[0]
    if mistake:
        raise StartupError(mistake)


def check_save_is_shared(config: Config, world: World, disk: Disk) -> None:
    """Raises StartupError on every rank if one of them does not see in the folder of --save what the first rank of its disk writes there.

    Every rank must call it. Without it the mistake would be found at the first save.
    """
    if config.checkpoint.save is None or world.world_size == 1:
        return
    folder = Path(config.checkpoint.save)
    probe = folder / f".probe_of_run_{world.gather_texts(secrets.token_hex(4))[0]}"
    if disk.is_first:
        os.close(create_new(probe))
    world.gather_texts("made")
    try:
        with world.agreement():
            if not becomes_visible(probe):
                instead = "" if config.checkpoint.node_local_checkpoints else OR_OF_NODES
                raise UserError(
                    f"--save {folder} on this rank's machine is not the folder that rank {disk.ranks[0]} sees; {SHARED_FOLDER}{instead}"
                )
    finally:
        if disk.is_first:
            probe.unlink()


def check_writable(flag: str, folder: Path, rank: int) -> None:
    """Makes the folder. Raises UserError if this rank cannot make a file in it."""
    probe = folder / f".probe_of_rank_{rank}-{own_token()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(create_new(probe))
        probe.unlink()
    except OSError as error:
        raise UserError(f"{flag} {folder} cannot be written to ({error.strerror}); {remedy_for(error)}.") from error
