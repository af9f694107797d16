"""Rules about samples whose tokens several ranks divide: C = --context-parallel-size ranks each have 1/C of the tokens.

Attention exchanges tokens for heads: each of the C ranks then has all tokens of 1/C of the heads that it would have alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zpp.config.counted import counted
from megatron_zpp.config.flag import FlagError, divisors, next_multiple, spelling_of
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.schema import Config, ModelConfig
from megatron_zpp.config.wrong_size import Proposal, WrongSize

CONTEXT_SIZE = "--context-parallel-size"
# Why a kind of exchange other than that of tokens for heads is refused.
UNAVAILABLE = {
    "p2p": "keys and values do not go around a ring",
    "allgather": "keys and values are not gathered on every rank",
    "a2a+p2p": "there is one exchange among all ranks of a sample, and no ring between groups of them",
}


def can_divide(model: ModelConfig, tensor_ranks: int, context_ranks: int) -> bool:
    """Whether the heads of `tensor_ranks` ranks, which share every layer, can be dealt to `context_ranks` ranks each."""
    ranks, groups = tensor_ranks * context_ranks, model.key_value_heads
    return model.num_attention_heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


def check_resolved(config: Config) -> None:
    """Raises FlagError for the first rule about divided samples that the filled-in values break."""
    if config.distributed.context_parallel_size == 1:
        return
    check_exchange(config)
    check_heads(config)
    check_tokens(config)
    check_compilation(config, "context_parallel_size")


def check_exchange(config: Config) -> None:
    """Raises FlagError if samples are divided and --cp-comm-type asks for another exchange than that of tokens for heads."""
    kind = config.distributed.cp_comm_type
    if config.distributed.context_parallel_size > 1 and kind in UNAVAILABLE:
        raise FlagError(
            f"--cp-comm-type {kind} is not available, because {UNAVAILABLE[kind]}; choose --cp-comm-type a2a, which exchanges tokens for "
            "heads, or leave it out."
        )


def check_heads(config: Config) -> None:
    """Every rank of a sample gets as many heads. Fewer key heads than ranks go to several ranks each."""
    model, distributed = config.model, config.distributed
    tensor_ranks, context_ranks = distributed.tensor_model_parallel_size, distributed.context_parallel_size
    if can_divide(model, tensor_ranks, context_ranks):
        return
    ranks = f"{CONTEXT_SIZE} {context_ranks}"
    if tensor_ranks > 1:
        ranks = f"{tensor_ranks * context_ranks} (--tensor-model-parallel-size {tensor_ranks} x {ranks})"
    if model.num_attention_heads % (tensor_ranks * context_ranks) != 0:
        broken = f"--num-attention-heads {model.num_attention_heads} is not a multiple of {ranks}"
    else:
        broken = (
            f"--num-query-groups {model.key_value_heads} and {ranks}: one must divide the other, so that key heads are dealt to ranks or "
            "ranks to key heads"
        )
    sizes = [size for size in divisors(model.num_attention_heads) if can_divide(model, tensor_ranks, size)]
    raise WrongSize(Proposal(broken, "context_parallel_size", context_ranks, sizes, f"choose {CONTEXT_SIZE}"))


def check_tokens(config: Config) -> None:
    """Tokens are divided by C, and with --sequence-parallel once more by T."""
    length, distributed = config.model.seq_length, config.distributed
    parts, flags = distributed.context_parallel_size, f"{CONTEXT_SIZE} {distributed.context_parallel_size}"
    if distributed.sequence_parallel:
        parts *= distributed.tensor_model_parallel_size
        flags = f"{parts} ({flags} x --tensor-model-parallel-size {distributed.tensor_model_parallel_size}, with --sequence-parallel)"
    if length % parts != 0:
        raise FlagError(
            f"--seq-length {length} is not a multiple of {flags}, by which tokens are divided; choose {length_near(config, parts)}."
        )


def length_near(config: Config, multiple: int) -> int:
    """The next multiple above --seq-length, or the one below it if --max-position-embeddings leaves no room for more tokens."""
    model = config.model
    above = next_multiple(model.seq_length, multiple)
    lacks_positions = model.learns_positions and "max_position_embeddings" in config.given and model.max_position_embeddings < above
    return above - multiple if lacks_positions and above > multiple else above


def check_compilation(config: Config, field: str) -> None:
    """A compiled block cannot wait for other ranks. field: the number of ranks that divide a sample or a layer."""
    if config.training.compile:
        size, flag = getattr(config.distributed, field), spelling_of(field)
        broken = f"--compile is not available with {flag} {size}, because blocks wait for other ranks"
        raise WrongSize(Proposal(broken, field, size, [1], f"leave --compile out, or choose {flag}"))


def surprising_costs(config: Config, ranks: RankCounts) -> Iterator[str]:
    """One line if the ranks that divide a sample are on several nodes: what their exchange costs."""
    inside = ranks.data_ranks_per_node
    if ranks.context <= inside:
        return
    again = " and again in blocks that backward recomputes" if config.model.recompute_granularity == "full" else ""
    yield (
        f"{CONTEXT_SIZE} {ranks.context}: the ranks of a sample are on {counted(ranks.context // inside, 'node')}, so of what attention "
        f"exchanges {ranks.context - inside} of {ranks.context} parts cross between nodes, in forward and backward of every block and "
        f"micro-batch{again}, while computation waits; a size of {inside} or less stays inside a node"
    )
