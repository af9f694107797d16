"""Rules between the sizes of the model and the number of tensor ranks, which share every layer.

T: --tensor-model-parallel-size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_zpp.config.batch_schedule import BatchSchedule
from megatron_zpp.config.flag import FlagError, divisors, next_multiple
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.rules_context import check_compilation, length_near
from megatron_zpp.config.schema import Config, ModelConfig, ZeroConfig
from megatron_zpp.config.wrong_size import Proposal, WrongSize

TENSOR_SIZE = "--tensor-model-parallel-size"


def check_tensor_ranks(model: ModelConfig, padded_vocab_size: int, tensor_ranks: int) -> None:
    """Raises FlagError for the first size of the model that `tensor_ranks` ranks cannot share.

    model: with its defaults filled in. padded_vocab_size: rows of the embedding.
    """
    check_layers(model, padded_vocab_size, tensor_ranks)
    check_vocabulary(model, padded_vocab_size, tensor_ranks)
    check_positions(model, tensor_ranks)


def check_resolved(config: Config) -> None:
    """Raises FlagError for the first rule about tensor ranks that the filled-in values break.

    The rule about the vocabulary comes later (`check_tensor_ranks`), because the tokenizer decides its size.
    """
    model, tensor_ranks = config.model, config.distributed.tensor_model_parallel_size
    if tensor_ranks == 1:
        return
    check_layers(model, model.padded_vocab_size or 0, tensor_ranks)
    check_positions(model, tensor_ranks)
    check_tokens(config)
    check_compilation(config, "tensor_model_parallel_size")


def known_rows(model: ModelConfig) -> int:
    """The rows of the embedding, or a number that divides them: the tokenizer may not have said its size yet."""
    return model.padded_vocab_size or model.make_vocab_size_divisible_by


def needless_division(config: Config) -> Iterator[str]:
    """One line if --partition-activations divides nothing."""
    if not config.model.partition_activations:
        return
    if config.distributed.tensor_model_parallel_size == 1:
        yield f"--partition-activations has no effect with {TENSOR_SIZE} 1, as no ranks share layers"
    elif config.distributed.sequence_parallel:
        yield "--partition-activations has no effect with --sequence-parallel, which divides the inputs of recomputed chunks already"


def surprising_costs(config: Config, ranks: RankCounts, batches: BatchSchedule) -> Iterator[str]:
    """One line for each cost of sharing layers that few users expect."""
    tensor_ranks, microbatches = ranks.tensor, batches.full_size // batches.grain
    if tensor_ranks == 1:
        return
    sent = _sent_between_nodes_by_every_microbatch(config.zero)
    if sent and microbatches > 1 and ranks.world > ranks.ranks_per_node:
        instead = f" instead of {microbatches // tensor_ranks}" if microbatches % tensor_ranks == 0 else ""
        yield (
            f"{TENSOR_SIZE} {tensor_ranks}: a global batch of {batches.full_size} is {microbatches} micro-batches of a rank{instead}, and "
            f"--zero-stage {config.zero.zero_stage} sends {sent} between nodes for each; raise --micro-batch-size if memory allows"
        )
    workers = config.data.num_workers
    if "num_workers" in config.given and workers > 1:
        yield (
            f"{TENSOR_SIZE} {tensor_ranks}: all {tensor_ranks} ranks that share layers read the same samples, with --num-workers {workers} "
            f"processes each, {workers * ranks.ranks_per_node} on a node; fewer may do"
        )


def _sent_between_nodes_by_every_microbatch(zero: ZeroConfig) -> str:
    weights = ["weights"] * (zero.zero_stage == 3 and not zero.zero_quantized_weight_differences)
    gradients = ["gradients"] * (zero.zero_stage >= 2 and zero.zero_gradients_between_microbatches == "primary")
    return " and ".join(weights + gradients)


def check_layers(model: ModelConfig, rows: int, tensor_ranks: int) -> None:
    """Heads, feed-forward halves and key heads are dealt to ranks. rows: of the embedding; 0 if they are not known."""
    if model.num_attention_heads % tensor_ranks != 0:
        broken = f"--num-attention-heads {model.num_attention_heads} is not a multiple of {TENSOR_SIZE} {tensor_ranks}"
    elif model.ffn_hidden_size % tensor_ranks != 0:
        broken = f"--ffn-hidden-size {model.ffn_hidden_size} is not a multiple of {TENSOR_SIZE} {tensor_ranks}"
    elif not _deals_groups(model, tensor_ranks):
        broken = (
            f"--num-query-groups {model.key_value_heads} and {TENSOR_SIZE} {tensor_ranks}: one must divide the other, so that groups are "
            "dealt to ranks or ranks to groups"
        )
    else:
        return
    positions = model.max_position_embeddings if model.learns_positions else 0
    common = math.gcd(model.num_attention_heads, model.ffn_hidden_size, positions, rows)
    sizes = [size for size in divisors(common) if _deals_groups(model, size)]
    raise WrongSize(Proposal(broken, "tensor_model_parallel_size", tensor_ranks, sizes, f"choose {TENSOR_SIZE}"))


def check_vocabulary(model: ModelConfig, padded_vocab_size: int, tensor_ranks: int) -> None:
    """The padded size does not depend on T, so that a checkpoint fits every T."""
    if padded_vocab_size % tensor_ranks == 0:
        return
    multiple = math.lcm(model.make_vocab_size_divisible_by, tensor_ranks)
    rows = next_multiple(padded_vocab_size, multiple)
    padding, remedy = "--padded-vocab-size", f"give --padded-vocab-size {rows}"
    if model.padded_vocab_size is None:
        padding = f"padded to a multiple of --make-vocab-size-divisible-by {model.make_vocab_size_divisible_by}"
        remedy = f"give --make-vocab-size-divisible-by {multiple} or --padded-vocab-size {rows}"
    fitting = max(size for size in divisors(math.gcd(padded_vocab_size, tensor_ranks)) if _deals_groups(model, size))
    raise FlagError(
        f"the vocabulary of {padded_vocab_size} rows ({padding}) is not a multiple of {TENSOR_SIZE} {tensor_ranks}; {remedy}, or, "
        f"for a checkpoint of {padded_vocab_size} rows, {TENSOR_SIZE} {fitting}."
    )


def check_positions(model: ModelConfig, tensor_ranks: int) -> None:
    """Learned positions are divided among the ranks like the vocabulary."""
    positions = model.max_position_embeddings
    if model.learns_positions and positions % tensor_ranks != 0:
        raise FlagError(
            f"--max-position-embeddings {positions} is not a multiple of {TENSOR_SIZE} {tensor_ranks}; "
            f"choose {next_multiple(positions, tensor_ranks)}."
        )


def check_tokens(config: Config) -> None:
    """With --sequence-parallel the ranks divide the tokens of a micro-batch, whatever number of samples it has."""
    length, tensor_ranks = config.model.seq_length, config.distributed.tensor_model_parallel_size
    if config.distributed.sequence_parallel and length % tensor_ranks != 0:
        raise FlagError(
            f"--seq-length {length} is not a multiple of {TENSOR_SIZE} {tensor_ranks}, among which --sequence-parallel divides tokens; "
            f"choose {length_near(config, tensor_ranks * config.distributed.context_parallel_size)}, or leave --sequence-parallel out."
        )


def _deals_groups(model: ModelConfig, tensor_ranks: int) -> bool:
    groups = model.key_value_heads
    return groups % tensor_ranks == 0 or tensor_ranks % groups == 0
