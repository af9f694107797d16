"""Builders of the parts of a run from its resolved configuration. They raise UserError for a mistake of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_zpp.comm.code import EXACT, Code
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.waits import Waits
from megatron_zpp.comm.world_links import WorldLinks
from megatron_zpp.config.counted import counted
from megatron_zpp.config.groups.zero import WORKING_DTYPE_BITS
from megatron_zpp.config.schema import Config, PrecisionConfig
from megatron_zpp.data.build_once import ProgressPrinter
from megatron_zpp.data.datasets import DataRequest, Datasets, build_datasets, cache_folder, count_samples
from megatron_zpp.data.token_check import check_token_ids_once
from megatron_zpp.data.tokenizers.tokenizer import embedding_rows, tokenizer_of_run
from megatron_zpp.model.compilation import compile_blocks
from megatron_zpp.model.document_attention import describe as describe_documents
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.model.gpt import GPT
from megatron_zpp.monitor.logging import RankPrinter
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.initialize import World
from megatron_zpp.parallel.islands import ranks_of_columns, ranks_of_islands
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.training.instruments import Instruments
from megatron_zpp.training.kept_inputs import about_kept_inputs, build_kept_inputs
from megatron_zpp.training.sample_order import ordered_samples, read_samples
from megatron_zpp.training.sharding import choose_policy, column_grid, grid_of, prefetch_of, sample_groups_of, world_size_of
from megatron_zpp.training.stored_run import StoredRun
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.loss_scaler import ConstantLossScaler, DynamicLossScaler, LossScaler


class Vocabulary(NamedTuple):
    """Vocabulary of the tokenizer. size: number of ids. padded_size: rows of the embedding. eod: the id that ends a document."""

    size: int
    padded_size: int
    eod: int


def build_links(config: Config, world: World, instruments: Instruments) -> Links:
    """The links of this rank inside its island, or in the world if that is one, with process groups of their own.

    Every rank must call it.
    """
    islands = ranks_of_islands(world.world_size, config.diloco.diloco_islands)
    return _connected(grid_of(config, world.world_size), islands, world, instruments)


def build_column(config: Config, world: World, instruments: Instruments) -> Links | None:
    """The links to the ranks that have the same place on the other islands; None without outer steps. Every rank must call it."""
    if not config.diloco.has_islands:
        return None
    columns = ranks_of_columns(world.world_size, config.diloco.diloco_islands)
    return _connected(column_grid(config), columns, world, instruments)


def _connected(grid: Grid, worlds: Sequence[Sequence[int]], world: World, instruments: Instruments) -> Links:
    waits = Waits(world.check_others, instruments.observer if instruments.observes_hops else Observer())
    return WorldLinks.connect(grid, worlds, world.device, world.collective_timeout, waits, world.connecting).links


def build_vocabulary(config: Config) -> Vocabulary:
    """Vocabulary of the tokenizer that the flags name."""
    tokenizer = tokenizer_of_run(config)
    padded_size = embedding_rows(config.model, tokenizer.vocab_size)
    return Vocabulary(tokenizer.vocab_size, padded_size, tokenizer.eod)


def progress_printer(launch: Launch, host: str, printer: RankPrinter) -> ProgressPrinter:
    """The printer for the progress of this rank's data. Of the ranks that wait, the first of each machine prints."""
    return ProgressPrinter(f"rank {launch.rank} on {host}", printer.on_this, prints_waiting=launch.local_rank == 0)


def build_run_data(
    config: Config, vocabulary: Vocabulary, stored: StoredRun | None, progress: ProgressPrinter, *, checks_token_ids: bool
) -> Datasets:
    """Training, validation and test data. stored: the run that this one resumes.

    checks_token_ids: whether this rank checks all corpora; one rank per machine is enough.
    """
    training = config.training
    counts = count_samples(
        train_samples=ordered_samples(config, stored),
        train_iters=training.train_iters,
        eval_interval=training.eval_interval,
        evaluated_samples=training.eval_iters * training.eval_global_batch_size,
    )
    request = DataRequest(
        config.model.seq_length,
        training.seed,
        counts,
        vocabulary.size,
        vocabulary.eod,
        validates_on_all=training.full_validation,
        read_samples=read_samples(config, stored),
    )
    datasets = build_datasets(config.data, request, progress)
    if checks_token_ids:
        for source in datasets.sources:
            check_token_ids_once(source, vocabulary.size, cache_folder(config.data, source), progress)
    return datasets


def build_model(config: Config, padded_vocab: int, stored: StoredRun | None, links: Links) -> GPT:
    """Model without storage, of this rank's parts of the layers. Its links are those of the ladder.

    Raises FlagError if the vocabulary does not divide among them, and CheckpointError if `stored` lacks what the run takes from it.
    """
    link = links.tensor_link
    tensor = TensorParallel(link, config.distributed.sequence_parallel) if link is not None else None
    model = GPT(config.model, padded_vocab, config.training.seed, working_dtype(config.precision), tensor, links.context_link)
    if stored is not None:
        stored.check_contents(config, model.unit_specs())
    if config.training.compile:
        compile_blocks(model)
    return model


def build_engine(config: Config, model: GPT, links: Links, instruments: Instruments) -> ZeroEngine:
    """Engine that shards the model. It allocates the storage of the model, and of kept inputs of recomputed chunks if it is to last."""
    kept_inputs = build_kept_inputs(config, working_dtype(config.precision), links)
    if kept_inputs is not None:
        model.keep_inputs(kept_inputs)
    options = engine_options(config, instruments.observer)
    return ZeroEngine(model, model.unit_specs(), model.uses(), options, links, _loss_scaler(config.precision))


def engine_options(config: Config, observer: Observer) -> EngineOptions:
    """The options of an engine that flags ask for."""
    optimizer, zero = config.optimizer, config.zero
    return EngineOptions(
        policy=choose_policy(zero),
        dtype=working_dtype(config.precision),
        block_numel=zero.quantization_block_size,
        prefetch=prefetch_of(zero),
        adam=AdamOptions(
            optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps, optimizer.weight_decay, optimizer.optimizer_backend
        ),
        clip_grad=optimizer.clip_grad,
        full_precision_iterations=zero.zero_full_precision_iters,
        noise_seed=config.training.seed,
        counts_zeros=config.logging.log_num_zeros_in_grad,
        observer=observer,
    )


def build_outer(config: Config, engine: ZeroEngine, column: Links | None) -> OuterSteps | None:
    """The outer steps that flags ask for. column: of `build_column`. Every rank must call it; no byte crosses."""
    return None if column is None else OuterSteps(engine, column, outer_options(config))


def outer_options(config: Config) -> OuterOptions:
    """The options of outer steps in a resolved configuration with --diloco-sync-period."""
    diloco = config.diloco
    period = diloco.diloco_sync_period
    if period is None:
        raise RuntimeError("the flags ask for no outer steps")
    return OuterOptions(
        period,
        diloco.diloco_outer_lr,
        diloco.diloco_outer_momentum,
        diloco.diloco_start_iteration or 0,
        _outer_code(diloco.diloco_outer_bits, rounds=2),
        _outer_code(diloco.diloco_difference_bits, rounds=1),
        diloco.diloco_overlap_steps,
        is_staggered=not diloco.diloco_all_at_once,
    )


def _outer_code(bits: int, rounds: int) -> Code:
    return EXACT if bits == WORKING_DTYPE_BITS else Code.gaussian(bits, rounds)


def _loss_scaler(precision: PrecisionConfig) -> LossScaler:
    if not precision.fp16:
        return ConstantLossScaler()
    if precision.loss_scale is not None:
        return ConstantLossScaler(precision.loss_scale)
    return DynamicLossScaler(precision.initial_loss_scale, precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis)


def working_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Dtype of working weights and activations."""
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def describe_run(config: Config, links: Links, vocab_size: int, model: GPT) -> list[str]:
    """Lines that describe the world, the backends, the vocabulary and the model."""
    grid, device, padded = links.grid, links.device, model.padded_vocab_size
    context = f"context-parallel size: {grid.context_ranks}, " if grid.context_ranks > 1 else ""
    nodes = f"{counted(config.diloco.diloco_islands * grid.nodes, 'node')} x {counted(grid.ranks_per_node, 'rank')}"
    lines = [
        f"using world size: {world_size_of(config, grid)}, data-parallel size: {sample_groups_of(config, grid)}, {context}"
        f"tensor-model-parallel size: {grid.tensor_ranks} ({nodes}), device: {device.type}, "
        f"backend: {'nccl' if device.type == 'cuda' else 'gloo'}",
        f"optimizer backend: {config.optimizer.optimizer_backend}, norm backend: {config.model.norm_backend}",
        f" > padded vocab (size: {vocab_size}) with {padded - vocab_size} dummy tokens (new size: {padded})",
        f" > number of parameters: {parameter_count(config.model, padded)}",
    ]
    if config.data.reset_attention_mask:
        head = model.head_shape(working_dtype(config.precision))
        lines.append(describe_documents(device, head, (config.training.micro_batch_size, config.model.seq_length)))
    return [*lines, *filter(None, [about_kept_inputs(config, device), _about_islands(config)])]


def _about_islands(config: Config) -> str:
    """A line about outer steps; empty without them."""
    diloco = config.diloco
    period = diloco.diloco_sync_period
    if period is None:
        return ""
    late = ", kept under way for 1 iteration" if diloco.diloco_overlap_steps else ""
    order = "all units at once" if diloco.diloco_all_at_once else "units in turns"
    return (
        f"islands: {diloco.diloco_islands}, joined every {counted(period, 'iteration')} ({order}, outer gradients in "
        f"{diloco.diloco_outer_bits} bits, changes in {diloco.diloco_difference_bits}, outer learning rate {diloco.diloco_outer_lr}, "
        f"momentum {diloco.diloco_outer_momentum}{late}); plain means until iteration {diloco.diloco_start_iteration}"
    )
