"""From a resolved configuration to the parts of a run: each function checks what it builds and raises ValueError for a user's mistake."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_zpp.checkpoint.manifest import CheckpointError, find_checkpoint
from megatron_zpp.checkpoint.reader import CheckpointReader, load_engine
from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.comm.lanes import make_lanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Ladder
from megatron_zpp.config.arguments import arguments
from megatron_zpp.config.options import options, spelling_of
from megatron_zpp.config.schema import GROUP_OF_FIELD, Config, PrecisionConfig, ZeroConfig
from megatron_zpp.data.datasets import Datasets, build_datasets, cache_folder, count_samples
from megatron_zpp.data.token_check import check_token_ids_once
from megatron_zpp.data.tokenizer import build_tokenizer, padded_vocab_size
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.model.gpt import GPT
from megatron_zpp.monitor.available_memory import bytes_for_rank
from megatron_zpp.monitor.jsonl import JsonLinesWriter
from megatron_zpp.monitor.logging import RankPrinter
from megatron_zpp.monitor.tensorboard import TensorboardWriter
from megatron_zpp.ops import extension
from megatron_zpp.ops.apex import check_apex
from megatron_zpp.parallel.groups import make_lane_groups
from megatron_zpp.parallel.initialize import StartupError, World, gather_texts
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.training.memory_need import check_fits
from megatron_zpp.training.metrics import Progress
from megatron_zpp.training.trainer import Outlets
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import EngineOptions, ZeroEngine
from megatron_zpp.zero.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaler
from megatron_zpp.zero.memory_plan import Sharding
from megatron_zpp.zero.policy import (
    POLICIES,
    CodeOptions,
    Policy,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Prefetch

# Paths may be spelled differently on different machines.
FLAGS_THAT_MAY_DIFFER = {"local_rank", *(option.name for option in options() if option.flag.unit == "path")}
# A change of one of these is legitimate, and easily made by accident.
FLAGS_OF_A_CONTINUED_RUN = (
    "seed",
    "seq_length",
    "global_batch_size",
    "train_iters",
    "data_path",
    "split",
    "tokenizer_type",
    "attention_dropout",
    "hidden_dropout",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "weight_decay",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
)


def use_deterministic_kernels() -> None:
    """Lets torch run only kernels that give the same bits every time. Must come before the first matrix product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def check_same_flags(config: Config) -> None:
    """Nothing, where every rank was started with the same flags, paths aside; every rank must call it.

    Raises StartupError naming the flags that differ, on every rank alike.
    """
    own = {name: value for name, value in arguments(config).items() if name not in FLAGS_THAT_MAY_DIFFER}
    by_rank = [json.loads(text) for text in gather_texts(json.dumps(own))]
    for rank, theirs in enumerate(by_rank):
        differing = [
            f"{spelling_of(name)} {by_rank[0][name]} on rank 0 and {theirs[name]} on rank {rank}"
            for name in own
            if theirs[name] != by_rank[0][name]
        ]
        if differing:
            raise StartupError(f"the ranks were started with different flags: {'; '.join(differing)}; give every rank the same.")


def build_ladder(config: Config, world: World) -> Ladder:
    """The two links of this rank, with process groups of their own; every rank must call it."""
    ranks_per_node = config.distributed.ranks_per_node
    partition_ranks = config.zero.zero_hpz_partition_size
    topology = Topology(world.world_size, ranks_per_node, partition_ranks if partition_ranks > 1 else ranks_per_node)
    groups = make_lane_groups(topology, world.rank, world.timeout)
    backend = TorchBackend(topology, world.rank, groups)
    return Ladder(backend, make_lanes(world.device, world.check_others), Ledger(topology, world.rank), world.device)


def build_vocabulary(config: Config) -> tuple[int, int]:
    """The vocabulary's size, and the size it is padded to."""
    vocab_size = build_tokenizer(config.data).vocab_size
    return vocab_size, padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by)


def build_run_data(config: Config, vocab_size: int, *, checks_token_ids: bool) -> Datasets:
    """Training, validation and test data. checks_token_ids: on one rank per machine, for the corpus as a whole."""
    training = config.training
    train_samples = training.train_samples or training.train_iters * training.global_batch_size
    counts = count_samples(
        train_samples=train_samples,
        global_batch_size=training.global_batch_size,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
    )
    datasets = build_datasets(
        config.data, seq_length=config.model.seq_length, seed=training.seed, sample_counts=counts, vocab_size=vocab_size
    )
    if checks_token_ids and datasets.source is not None:
        check_token_ids_once(datasets.source, vocab_size, cache_folder(config.data, datasets.source))
    return datasets


def find_reader(config: Config) -> CheckpointReader | None:
    """The checkpoint to load, open; None where --load is not given, or holds none and the run may start anew."""
    checkpoint = config.checkpoint
    if checkpoint.load is None:
        return None
    folder = find_checkpoint(Path(checkpoint.load), checkpoint.ckpt_step)
    if folder is None and checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(f"--load {checkpoint.load} holds no checkpoint and --exit-on-missing-checkpoint is given; correct the path")
    return None if folder is None else CheckpointReader(folder)


def check_backends(config: Config, device: torch.device) -> None:
    """Nothing, where NVIDIA Apex is there as far as flags ask for it. Must come before the model and the engine."""
    if config.optimizer.optimizer_backend == "apex":
        check_apex("--optimizer-backend", "amp_C", device.type)
    if config.model.norm_backend == "apex":
        check_apex("--norm-backend", "fused_layer_norm_cuda", device.type)


def build_model(config: Config, padded_vocab: int, reader: CheckpointReader | None) -> GPT:
    """The model, without storage; checked against the checkpoint that is to be loaded."""
    model = GPT(config.model, padded_vocab, config.training.seed, working_dtype(config.precision))
    if reader is not None:
        shapes = {param.name: param.shape for unit in model.unit_specs() for param in unit.params}
        reader.check_model(shapes, asdict(config.model))
    return model


def memory_per_rank(world: World, hosts: Sequence[str]) -> int | None:
    """Bytes that every rank may use, the least of all ranks; None where nobody can tell. Every rank must call it.

    hosts: the host name of every rank, in rank order.
    """
    nbytes = bytes_for_rank(world.device, hosts.count(hosts[world.rank]))
    found = [int(text) for text in gather_texts("" if nbytes is None else str(nbytes)) if text]
    return min(found, default=None)


def check_memory(config: Config, model: GPT, topology: Topology, device: torch.device, bytes_there: int | None) -> None:
    """Nothing, where the run fits in the memory of every rank. Must come before the engine, which allocates."""
    sharding = Sharding(
        policy=choose_policy(config.zero),
        block_numel=config.zero.quantization_block_size,
        element_bytes=working_dtype(config.precision).itemsize,
        prefetch=_prefetch(config.zero),
    )
    check_fits(config, model, sharding, topology, is_on_gpu=device.type == "cuda", bytes_there=bytes_there)


def build_engine(config: Config, model: GPT, ladder: Ladder, device: torch.device) -> ZeroEngine:
    """The engine over the model's units; the model gets its storage here."""
    optimizer, zero = config.optimizer, config.zero
    dtype = working_dtype(config.precision)
    options = EngineOptions(
        policy=choose_policy(zero),
        dtype=dtype,
        block_numel=zero.quantization_block_size,
        prefetch=_prefetch(zero),
        adam=AdamOptions(
            optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps, optimizer.weight_decay, optimizer.optimizer_backend
        ),
        clip_grad=optimizer.clip_grad,
        full_precision_iterations=zero.zero_full_precision_iters,
        noise_seed=config.training.seed,
    )
    return ZeroEngine(model, model.unit_specs(), model.uses(), options, ladder, device, _loss_scaler(config.precision))


def prepare_kernels(config: Config, device: torch.device) -> str:
    """Loads the quantization kernels where a run quantizes, and says what it runs on; an empty string where nothing is quantized."""
    if not (config.zero.zero_quantized_weights or config.zero.zero_quantized_gradients):
        return ""
    extension.load()
    return extension.report(device.type)


def choose_policy(zero: ZeroConfig) -> Policy:
    """The row of the policy table that the flags ask for."""
    policy = POLICIES[zero.zero_stage]
    if zero.zero_quantized_weights:
        policy = with_quantized_weights(policy, zero.zero_quantized_weights_bits)
    if zero.zero_hpz_partition_size > 1:
        policy = with_secondary_weights(policy)
    if zero.zero_quantized_gradients:
        options = CodeOptions(
            is_rotated=zero.zero_quantized_gradients_rotation == "hadamard",
            is_stochastic=zero.zero_quantized_gradients_rounding == "stochastic",
        )
        intra_bits, inter_bits = zero.zero_quantized_gradients_intra_bits, zero.zero_quantized_gradients_inter_bits
        policy = with_quantized_gradients(policy, intra_bits, inter_bits, options)
    return policy


def load_progress(config: Config, engine: ZeroEngine, reader: CheckpointReader | None) -> Progress:
    """Where the run goes on: after the checkpoint, whose weights and optimizer state the engine takes over, or at the start."""
    if reader is None:
        return Progress()
    checkpoint, manifest = config.checkpoint, reader.manifest
    load_engine(engine, reader, with_moments=not (checkpoint.no_load_optim or checkpoint.finetune))
    if checkpoint.finetune:
        return Progress()
    engine.start_iteration(manifest.iteration)
    return Progress(manifest.iteration, manifest.consumed_samples, manifest.run["scheduled_samples"])


def describe_run(config: Config, ladder: Ladder, vocab_size: int, model: GPT) -> list[str]:
    """Who trains what on what, in lines."""
    topology, device, padded = ladder.topology, ladder.staging.device, model.padded_vocab_size
    nodes = topology.world_size // topology.ranks_per_node
    return [
        f"using world size: {topology.world_size} ({nodes} nodes x {topology.ranks_per_node} ranks), device: {device.type}, "
        f"backend: {'nccl' if device.type == 'cuda' else 'gloo'}",
        f"optimizer backend: {config.optimizer.optimizer_backend}, norm backend: {config.model.norm_backend}",
        f" > padded vocab (size: {vocab_size}) with {padded - vocab_size} dummy tokens (new size: {padded})",
        f" > number of parameters: {parameter_count(config.model, padded)}",
    ]


def describe_start(config: Config, reader: CheckpointReader | None, progress: Progress) -> str:
    """What was loaded, and which flags of a run that goes on differ from those it was started with; an empty string without --load."""
    if config.checkpoint.load is None:
        return ""
    if reader is None:
        return f"WARNING: --load {config.checkpoint.load} holds no checkpoint; starting from scratch"
    lines = [f"  successfully loaded checkpoint from {reader.folder} at iteration {reader.manifest.iteration}"]
    if progress.iteration >= config.training.train_iters:
        lines.append(f"nothing left to train: --train-iters {config.training.train_iters} is reached")
    if not config.checkpoint.finetune:
        differing = flags_that_differ(config, reader.manifest.flags)
        lines += [f"WARNING: the checkpoint's run had other flags: {'; '.join(differing)}"] if differing else []
    return "\n".join(lines)


def flags_that_differ(config: Config, theirs: Mapping[str, Any]) -> list[str]:
    """The flags that decide data order, numbers or rates, where this run's differ from a checkpoint's, each with both values."""
    differing = []
    for name in FLAGS_OF_A_CONTINUED_RUN:
        group = GROUP_OF_FIELD[name]
        then, now = theirs.get(group, {}).get(name), config.value_of(name)
        then = tuple(then) if isinstance(then, list) else then
        if name in theirs.get(group, {}) and then != now:
            differing.append(f"{spelling_of(name)} {then} there and {now} here")
    return differing


def open_outlets(config: Config, printer: RankPrinter) -> Outlets:
    """The files and printers of this rank. Raises ValueError for a folder that this rank cannot write to."""
    logging = config.logging
    if config.checkpoint.save is not None:
        check_writable("--save", Path(config.checkpoint.save), printer.rank)
    if logging.tensorboard_dir is not None:
        check_writable("--tensorboard-dir", Path(logging.tensorboard_dir), printer.rank)
    json_lines = JsonLinesWriter(logging.log_jsonl) if logging.log_jsonl is not None and printer.rank == 0 else None
    tensorboard = None
    if logging.tensorboard_dir is not None and printer.rank == printer.world_size - 1:
        tensorboard = TensorboardWriter(logging.tensorboard_dir, logging.tensorboard_queue_size)
        tensorboard.write_arguments(arguments(config))
    return Outlets(printer, json_lines, tensorboard)


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


def _prefetch(zero: ZeroConfig) -> Prefetch:
    return Prefetch(zero.zero_prefetch_units, zero.zero_prefetch_units_intra)


def _loss_scaler(precision: PrecisionConfig) -> LossScaler:
    if not precision.fp16:
        return ConstantLossScaler()
    if precision.loss_scale is not None:
        return ConstantLossScaler(precision.loss_scale)
    return DynamicLossScaler(precision.initial_loss_scale, precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis)
