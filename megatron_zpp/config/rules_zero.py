"""Rules about sharding, quantization and the world of ranks."""

from __future__ import annotations

from megatron_zpp.config.counted import counted
from megatron_zpp.config.flag import FlagError, any_of, divisors, in_words, spelling_of
from megatron_zpp.config.groups.zero import BLOCK_BITS, GAUSSIAN_BITS, WORKING_DTYPE_BITS
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.schema import Config

QUANTIZED = ("zero_quantized_weights", "zero_quantized_weight_differences", "zero_quantized_gradients")
ABSMAX_BITS = (*BLOCK_BITS, WORKING_DTYPE_BITS)
GAUSSIAN_INTRA_BITS = 8
GAUSSIAN_BLOCK = 256
DIFFERENCES = "--zero-quantized-weight-differences"


def check_given(config: Config) -> None:
    """Raises FlagError for the first rule that the flags break as they were given."""
    check_quantized_stage(config)
    check_differences(config)
    check_gradients_code(config)
    check_gradients_are_quantized_somewhere(config)
    check_blocks_of_gaussian_codes(config)
    check_gradients_between_microbatches(config)
    check_secondary_partition(config)
    check_offload(config)


def check_resolved(config: Config, ranks: RankCounts) -> None:
    """Raises FlagError for the first rule that the filled-in values break in a world of these ranks. An island is a world of its own."""
    of_island = ranks.of_island
    check_partition_divides_node(config, of_island)
    check_copy_is_kept(config, of_island)
    check_remaining_link_is_quantized(config, of_island, one_node(ranks))


def one_node(ranks: RankCounts) -> str:
    """That there is no link between nodes, in words."""
    return "there is one node" if ranks.islands == 1 else "an island has one node"


def check_quantized_stage(config: Config) -> None:
    """ZeRO++ quantizes what crosses a link between shards. Stage 0 has no shards."""
    for name in QUANTIZED:
        if config.value_of(name) and config.zero.zero_stage == 0:
            raise FlagError(f"{spelling_of(name)} has nothing to quantize in --zero-stage 0; choose --zero-stage 1, 2 or 3.")


def check_differences(config: Config) -> None:
    """Differences take the place of quantized weights."""
    if config.zero.zero_quantized_weight_differences and config.zero.zero_quantized_weights:
        raise FlagError(
            "--zero-quantized-weight-differences and --zero-quantized-weights are two codes for the same weights; give only one of them."
        )


def check_gradients_code(config: Config) -> None:
    """The Gaussian code has bits of its own, rotates by itself and has no integers to round."""
    zero = config.zero
    code, inter, intra = (
        zero.zero_quantized_gradients_code,
        zero.zero_quantized_gradients_inter_bits,
        zero.zero_quantized_gradients_intra_bits,
    )
    if code == "absmax" and inter not in (None, *ABSMAX_BITS):
        raise FlagError(
            f"--zero-quantized-gradients-inter-bits {inter} needs --zero-quantized-gradients-code gaussian; give that as well, "
            f"or choose {any_of(ABSMAX_BITS)}."
        )
    if code != "gaussian":
        return
    if inter not in (None, *GAUSSIAN_BITS):
        raise FlagError(
            f"--zero-quantized-gradients-inter-bits {inter} is not available with --zero-quantized-gradients-code gaussian; "
            f"choose {any_of(GAUSSIAN_BITS)}."
        )
    if intra not in (None, GAUSSIAN_INTRA_BITS):
        raise FlagError(
            f"--zero-quantized-gradients-intra-bits {intra} is not available with --zero-quantized-gradients-code gaussian; "
            f"choose {GAUSSIAN_INTRA_BITS}, or leave it out."
        )
    for name, neutral in (("zero_quantized_gradients_rotation", "none"), ("zero_quantized_gradients_rounding", "nearest")):
        if config.value_of(name) != neutral:
            raise FlagError(
                f"{in_words(name, config.value_of(name))} belongs to --zero-quantized-gradients-code absmax, because the gaussian code "
                "rotates values at random by itself; leave one of the two out."
            )


def check_blocks_of_gaussian_codes(config: Config) -> None:
    zero = config.zero
    names = _gaussian_codes(config)
    if names and zero.quantization_block_size % GAUSSIAN_BLOCK:
        raise FlagError(
            f"--quantization-block-size {zero.quantization_block_size} does not fit {names[0]}, which has blocks of {GAUSSIAN_BLOCK} "
            f"values; choose a multiple of {GAUSSIAN_BLOCK}."
        )


def _gaussian_codes(config: Config) -> list[str]:
    """The given flags that ask for a code in blocks of 256."""
    zero = config.zero
    names = [DIFFERENCES] * zero.zero_quantized_weight_differences
    return names + ["--zero-quantized-gradients-code gaussian"] * (zero.zero_quantized_gradients_code == "gaussian")


def check_gradients_between_microbatches(config: Config) -> None:
    where, stage = config.zero.zero_gradients_between_microbatches, config.zero.zero_stage
    if where == "secondary" and stage < 2:
        raise FlagError(
            f"--zero-gradients-between-microbatches secondary has no effect on --zero-stage {stage}, which adds up whole gradients on "
            "every rank; choose --zero-stage 2 or 3, or leave it out."
        )


def check_copy_is_kept(config: Config, ranks: RankCounts) -> None:
    """In stage 3 differences need a copy divided among the ranks of a partition. A partition of one rank would keep all weights."""
    zero = config.zero
    if not zero.zero_quantized_weight_differences or zero.zero_stage != 3 or ranks.data == 1:
        return
    if ranks.data_ranks_per_node == 1:
        raise FlagError(
            "--zero-quantized-weight-differences in --zero-stage 3 keeps a copy of the weights divided among the ranks of a node, and "
            f"{_one_rank_per_node(ranks)}; choose --zero-stage 2, which keeps all weights on every rank."
        )
    if zero.zero_hpz_partition_size == 1:
        raise FlagError(
            "--zero-quantized-weight-differences in --zero-stage 3 has no copy of the weights to which differences could be added; give "
            f"--zero-hpz-partition-size {ranks.data_ranks_per_node}, the ranks of a node, or choose --zero-stage 2 or 1, which keep all "
            "weights on every rank."
        )


def check_gradients_are_quantized_somewhere(config: Config) -> None:
    zero = config.zero
    if (
        zero.zero_quantized_gradients
        and zero.zero_quantized_gradients_intra_bits == zero.zero_quantized_gradients_inter_bits == WORKING_DTYPE_BITS
    ):
        raise FlagError(
            "--zero-quantized-gradients with 16 bits inside a partition and between partitions quantizes nothing; choose 4 or 8 for "
            "--zero-quantized-gradients-inter-bits, or leave --zero-quantized-gradients out."
        )


def check_secondary_partition(config: Config) -> None:
    partition_ranks = config.zero.zero_hpz_partition_size
    if partition_ranks > 1 and config.zero.zero_stage != 3:
        raise FlagError(
            f"--zero-hpz-partition-size {partition_ranks} keeps a copy of sharded weights, which --zero-stage {config.zero.zero_stage} "
            "does not have; choose --zero-stage 3, or --zero-hpz-partition-size 1 for no copy."
        )


def check_offload(config: Config) -> None:
    """Only what has one owner is updated on a host, and Apex has no kernels for it."""
    if not config.zero.optimizer_cpu_offload:
        return
    if config.zero.zero_stage == 0:
        raise FlagError(
            "--optimizer-cpu-offload needs slices that each have one owner, and in --zero-stage 0 every rank updates all weights; choose "
            "--zero-stage 1, 2 or 3."
        )
    if config.optimizer.optimizer_backend == "apex":
        raise FlagError(
            "--optimizer-backend apex has no AdamW for --optimizer-cpu-offload, which updates weights on the host; choose "
            "--optimizer-backend torch."
        )


def check_partition_divides_node(config: Config, ranks: RankCounts) -> None:
    partition_ranks, ranks_per_node = config.zero.zero_hpz_partition_size, ranks.data_ranks_per_node
    if ranks_per_node % partition_ranks == 0:
        return
    if ranks.tensor > 1:
        copies = "".join(f"{any_of(sizes)}, or " for sizes in [divisors(ranks_per_node)[1:]] if sizes)
        raise FlagError(
            f"--zero-hpz-partition-size {partition_ranks} does not divide the {counted(ranks_per_node, 'rank')} of a node with the same "
            f"part of a layer ({counted(ranks.ranks_per_node, 'rank')}, --tensor-model-parallel-size {ranks.tensor}); "
            f"choose {copies}1 for no copy."
        )
    raise FlagError(
        f"--zero-hpz-partition-size {partition_ranks} does not divide the {counted(ranks_per_node, 'rank')} of a node; "
        f"choose {any_of(divisors(ranks_per_node))}, or start a multiple of {partition_ranks} ranks per node."
    )


def check_remaining_link_is_quantized(config: Config, ranks: RankCounts, one_node: str) -> None:
    """With one partition, or partitions of one rank, gradients cross one link only, which must not have 16 bits."""
    if not has_inter_link(config, ranks):
        name, reason = "zero_quantized_gradients_intra_bits", one_node
    elif partition_ranks(config, ranks.data_ranks_per_node) == 1:
        name, reason = "zero_quantized_gradients_inter_bits", _one_rank_per_node(ranks)
    else:
        return
    if config.zero.zero_quantized_gradients and config.value_of(name) == WORKING_DTYPE_BITS:
        raise FlagError(
            f"{spelling_of(name)} 16 leaves --zero-quantized-gradients nothing to quantize, because {reason}; "
            "choose 4 or 8, or leave --zero-quantized-gradients out."
        )


def _one_rank_per_node(ranks: RankCounts) -> str:
    if ranks.tensor == 1:
        return "each node has one rank"
    return f"with --tensor-model-parallel-size {ranks.tensor} each node has one rank with samples of its own"


def partition_ranks(config: Config, data_ranks_per_node: int) -> int:
    """Ranks of a partition: --zero-hpz-partition-size, or the ranks of a node in one ladder if that is 1."""
    asked = config.zero.zero_hpz_partition_size
    return asked if asked > 1 else data_ranks_per_node


def has_inter_link(config: Config, ranks: RankCounts) -> bool:
    """Whether there are several partitions, and so a link between them."""
    return ranks.data > partition_ranks(config, ranks.data_ranks_per_node)


def missing_links(config: Config, ranks: RankCounts, asked_partition_ranks: int) -> list[str]:
    """Lines about flags of ZeRO++ that do less than usual, because there is no link between partitions or none inside them.

    asked_partition_ranks: --zero-hpz-partition-size as given. With one data rank the configuration has 1 instead.
    """
    alone_in_words, of_island, ranks = one_node(ranks), " of an island" if ranks.islands > 1 else "", ranks.of_island
    features = [spelling_of(name) for name in QUANTIZED if config.value_of(name)]
    if asked_partition_ranks > config.zero.zero_hpz_partition_size:
        features.insert(0, in_words("zero_hpz_partition_size", asked_partition_ranks))
    if not features:
        return []
    if ranks.data == 1:
        alone = alone_in_words.replace("node", "rank")
        if ranks.tensor > 1:
            alone = f"all {ranks.world} ranks{of_island} have the same samples (--tensor-model-parallel-size)"
        return [f"{' and '.join(features)}: {alone}, so nothing crosses a link, is quantized or kept as a copy"]
    if has_inter_link(config, ranks):
        if ranks.tensor == 1 or ranks.data_ranks_per_node > 1:
            return []
        return [f"{' and '.join(features)}: {_one_rank_per_node(ranks)}, so only the link between nodes carries quantized values"]
    others = [feature for feature in features if feature != DIFFERENCES]
    lines = [f"{' and '.join(others)}: {alone_in_words}, so only the link inside it carries quantized values"] if others else []
    if DIFFERENCES in features:
        lines.append(
            f"{DIFFERENCES}: {alone_in_words}, so no differences are sent; weights cross the link inside it in the working precision"
        )
    return lines
