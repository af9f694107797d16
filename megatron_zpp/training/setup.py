"""From a resolved configuration to the parts of a run: each function checks what it builds and raises ValueError for a user's mistake."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_zpp.checkpoint.durable import SHARED_FOLDER, is_seen
from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.comm.lanes import Lanes, make_lanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Ladder
from megatron_zpp.comm.observed_lanes import ObservedLanes
from megatron_zpp.config.batch_schedule import batch_schedule, length_in_samples
from megatron_zpp.config.data_sources import read_sources
from megatron_zpp.config.flag import any_of
from megatron_zpp.config.options import arguments, options, spelling_of
from megatron_zpp.config.schema import Config, PrecisionConfig
from megatron_zpp.data.build_once import Speaker
from megatron_zpp.data.datasets import DataRequest, Datasets, build_datasets, cache_folder, count_samples
from megatron_zpp.data.token_check import check_token_ids_once
from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer, embedding_rows
from megatron_zpp.model.attention_kernel import check_attention, head_shape_of
from megatron_zpp.model.compilation import check_compilation, compile_blocks
from megatron_zpp.model.document_attention import describe as describe_documents
from megatron_zpp.model.document_attention import has_varlen
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.model.gpt import GPT
from megatron_zpp.monitor.available_memory import bytes_for_rank
from megatron_zpp.monitor.jsonl import JsonLinesWriter
from megatron_zpp.monitor.logging import RankPrinter
from megatron_zpp.monitor.progress_file import ProgressFile
from megatron_zpp.monitor.scalars import ScalarWriter
from megatron_zpp.monitor.tensorboard import TensorboardWriter
from megatron_zpp.monitor.wandb_writer import WandbRun, WandbWriter
from megatron_zpp.ops import extension
from megatron_zpp.ops.apex import check_apex
from megatron_zpp.parallel.groups import make_lane_groups
from megatron_zpp.parallel.initialize import StartupError, World, gather_texts
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.training.instruments import Instruments
from megatron_zpp.training.memory_need import MemoryThere, check_fits
from megatron_zpp.training.reporter import Writers
from megatron_zpp.training.sharding import choose_policy, prefetch_of, sharding_of, topology_of
from megatron_zpp.training.stored_run import StoredRun
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import EngineOptions, ZeroEngine
from megatron_zpp.zero.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaler

# With which cuBLAS documents the same bits every time.
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
# Paths may be spelled differently on different machines.
FLAGS_THAT_MAY_DIFFER = {"local_rank", *(option.name for option in options() if option.flag.unit == "path")}


class Vocabulary(NamedTuple):
    """size: number of ids. padded_size: rows of the embedding. eod: the id that ends a document."""

    size: int
    padded_size: int
    eod: int


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


def build_ladder(config: Config, world: World, instruments: Instruments) -> Ladder:
    """The two links of this rank, with process groups of their own; every rank must call it."""
    topology = topology_of(config, world.world_size)
    groups = make_lane_groups(topology, world.rank, world.collective_timeout)
    backend = TorchBackend(topology, world.rank, groups)
    lanes: Lanes = make_lanes(world.device, world.check_others)
    if instruments.observes_hops:
        lanes = ObservedLanes(lanes, instruments.observer)
    return Ladder(backend, lanes, Ledger(topology, world.rank), world.device)


def build_vocabulary(config: Config) -> Vocabulary:
    """The tokenizer's ids, as the model and the data need to know them."""
    tokenizer = build_tokenizer(config.data)
    padded_size = embedding_rows(config.model, tokenizer.vocab_size)
    return Vocabulary(tokenizer.vocab_size, padded_size, tokenizer.eod)


def speaker_of(launch: Launch, host: str, printer: RankPrinter) -> Speaker:
    """This rank's voice while data is prepared: whoever builds says so, and of those that wait the first of each machine."""
    return Speaker(f"rank {launch.rank} on {host}", printer.on_this, announces_waiting=launch.local_rank == 0)


def build_run_data(config: Config, vocabulary: Vocabulary, speaker: Speaker, *, checks_token_ids: bool) -> Datasets:
    """Training, validation and test data. checks_token_ids: on one rank per machine, for the corpora as a whole."""
    training = config.training
    counts = count_samples(
        train_samples=length_in_samples(training, batch_schedule(training, config.model.seq_length)),
        train_iters=training.train_iters,
        eval_interval=training.eval_interval,
        evaluated_samples=training.eval_iters * training.eval_global_batch_size,
    )
    request = DataRequest(
        config.model.seq_length, training.seed, counts, vocabulary.size, vocabulary.eod, validates_on_all=training.full_validation
    )
    datasets = build_datasets(config.data, request, speaker)
    if checks_token_ids:
        for source in datasets.sources:
            check_token_ids_once(source, vocabulary.size, cache_folder(config.data, source), speaker)
    return datasets


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


def build_model(config: Config, padded_vocab: int, stored: StoredRun | None) -> GPT:
    """The model, without storage; checked against the checkpoint that is to be loaded."""
    model = GPT(config.model, padded_vocab, config.training.seed, working_dtype(config.precision))
    if stored is not None:
        stored.check_contents(config, model.unit_specs())
    if config.training.compile:
        compile_blocks(model)
    return model


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


def build_engine(config: Config, model: GPT, ladder: Ladder, instruments: Instruments) -> ZeroEngine:
    """The engine over the model's units; the model gets its storage here."""
    optimizer, zero = config.optimizer, config.zero
    dtype = working_dtype(config.precision)
    options = EngineOptions(
        policy=choose_policy(zero),
        dtype=dtype,
        block_numel=zero.quantization_block_size,
        prefetch=prefetch_of(zero),
        adam=AdamOptions(
            optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps, optimizer.weight_decay, optimizer.optimizer_backend
        ),
        clip_grad=optimizer.clip_grad,
        full_precision_iterations=zero.zero_full_precision_iters,
        noise_seed=config.training.seed,
        counts_zeros=config.logging.log_num_zeros_in_grad,
        observer=instruments.observer,
    )
    device = ladder.staging.device
    return ZeroEngine(model, model.unit_specs(), model.uses(), options, ladder, device, _loss_scaler(config.precision))


def prepare_kernels(config: Config, device: torch.device) -> str:
    """Loads the quantization kernels where a run quantizes, and says what it runs on; an empty string where nothing is quantized."""
    if not (config.zero.zero_quantized_weights or config.zero.zero_quantized_gradients):
        return ""
    extension.load()
    return extension.report(device.type)


def describe_run(config: Config, ladder: Ladder, vocab_size: int, model: GPT) -> list[str]:
    """Who trains what on what, in lines."""
    topology, device, padded = ladder.topology, ladder.staging.device, model.padded_vocab_size
    return [
        f"using world size: {topology.world_size} ({topology.nodes} nodes x {topology.ranks_per_node} ranks), device: {device.type}, "
        f"backend: {'nccl' if device.type == 'cuda' else 'gloo'}",
        f"optimizer backend: {config.optimizer.optimizer_backend}, norm backend: {config.model.norm_backend}",
        f" > padded vocab (size: {vocab_size}) with {padded - vocab_size} dummy tokens (new size: {padded})",
        f" > number of parameters: {parameter_count(config.model, padded)}",
        *_documents_in_words(config, model, device),
    ]


def _documents_in_words(config: Config, model: GPT, device: torch.device) -> list[str]:
    if not config.data.reset_attention_mask:
        return []
    head = model.head_shape(working_dtype(config.precision))
    return [describe_documents(device, head, (config.training.micro_batch_size, config.model.seq_length))]


def open_writers(config: Config, printer: RankPrinter, instruments: Instruments) -> Writers:
    """The files and printers of this rank. Raises ValueError for a folder that this rank cannot write to."""
    logging = config.logging
    if config.checkpoint.save is not None:
        check_writable("--save", Path(config.checkpoint.save), printer.rank)
    if logging.tensorboard_dir is not None:
        check_writable("--tensorboard-dir", Path(logging.tensorboard_dir), printer.rank)
    if config.profiling.profile_dir is not None and instruments.profiler is not None:
        check_writable("--profile-dir", Path(config.profiling.profile_dir), printer.rank)
    if instruments.memory_history is not None:
        check_writable("--memory-snapshot-path", Path(config.profiling.memory_snapshot_path).parent, printer.rank)
    json_lines = JsonLinesWriter(logging.log_jsonl) if logging.log_jsonl is not None and printer.rank == 0 else None
    progress_file = None
    if config.checkpoint.save is not None and logging.log_progress and printer.rank == 0:
        progress_file = ProgressFile(Path(config.checkpoint.save), os.environ.get("SLURM_JOB_ID", ""), printer.world_size)
    scalars = tuple(_scalar_writers(config, printer.rank)) if printer.rank == printer.world_size - 1 else ()
    return Writers(printer, instruments, json_lines, progress_file, scalars)


def _scalar_writers(config: Config, rank: int) -> Iterator[ScalarWriter]:
    logging = config.logging
    if logging.tensorboard_dir is not None:
        tensorboard = TensorboardWriter(logging.tensorboard_dir, logging.tensorboard_queue_size)
        tensorboard.write_arguments(arguments(config))
        yield tensorboard
    if logging.wandb_project is not None:
        folder = Path(config.checkpoint.save) / "wandb" if config.checkpoint.save is not None else None
        directory = folder if logging.wandb_save_dir is None else Path(logging.wandb_save_dir)
        if directory is not None:
            check_writable("--wandb-save-dir", directory, rank)
        yield WandbWriter(WandbRun(logging.wandb_project, logging.wandb_entity, logging.wandb_exp_name, directory), arguments(config))


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


def working_dtype(precision: PrecisionConfig) -> torch.dtype:
    """The number format of working weights and activations."""
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def _shares_in_words(config: Config) -> str:
    """The number of corpora and their weights, which must not differ where paths may; of each split with corpora of its own."""
    sources = read_sources(config.data)
    blends = {"": sources.common} if sources.common is not None else sources.by_split
    words = (f"{split} {len(blend.prefixes)} corpora of weights {blend.weights}" for split, blend in blends.items() if blend is not None)
    return ", ".join(words).strip()


def _loss_scaler(precision: PrecisionConfig) -> LossScaler:
    if not precision.fp16:
        return ConstantLossScaler()
    if precision.loss_scale is not None:
        return ConstantLossScaler(precision.loss_scale)
    return DynamicLossScaler(precision.initial_loss_scale, precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis)
