"""Rules about islands, which train copies of the model by themselves and agree from time to time."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zpp.config.batch_schedule import BatchSchedule
from megatron_zpp.config.counted import counted
from megatron_zpp.config.defaults import warmup_iterations
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.groups.zero import WORKING_DTYPE_BITS
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.rules_zero import DIFFERENCES, GAUSSIAN_BLOCK, has_inter_link
from megatron_zpp.config.schema import Config

PERIOD = "--diloco-sync-period"
CODED = ("diloco_outer_bits", "diloco_difference_bits")
FEWEST_OUTER_STEPS = 10  # with fewer, outer momentum has not settled, and a run ends far above plain training


def check_resolved(config: Config, ranks: RankCounts) -> None:
    """Raises FlagError for the first rule about islands that the filled-in values break in a world of these ranks."""
    if not config.diloco.has_islands:
        return
    check_inner_optimizer(config, ranks)
    if config.diloco.diloco_islands > 1 and any(config.value_of(name) != WORKING_DTYPE_BITS for name in CODED):
        check_codes(config, ranks)


def check_inner_optimizer(config: Config, ranks: RankCounts) -> None:
    """Islands divide what a rank updates, and write it."""
    zero, of_island = config.zero, ranks.of_island
    if zero.zero_stage == 0 and of_island.data > 1:
        raise FlagError(
            f"--zero-stage 0 lets each of the {of_island.data} ranks of an island update all weights, and {PERIOD} divides among the "
            "islands what a rank updates; choose --zero-stage 1, 2 or 3."
        )
    if zero.zero_quantized_weight_differences and has_inter_link(config, of_island):
        raise FlagError(
            f"{DIFFERENCES} adds differences to copies that it keeps between the nodes of an island, and {PERIOD} writes weights; leave it "
            "out, or give every node an island of its own by leaving --diloco-islands out."
        )


def check_codes(config: Config, ranks: RankCounts) -> None:
    """The Gaussian codes between islands have blocks of their own."""
    block, exact = config.zero.quantization_block_size, "--diloco-outer-bits 16 and --diloco-difference-bits 16"
    if block % GAUSSIAN_BLOCK:
        raise FlagError(
            f"--quantization-block-size {block} does not fit {PERIOD}, whose codes have blocks of {GAUSSIAN_BLOCK} values; choose a "
            f"multiple of {GAUSSIAN_BLOCK}, or {exact}."
        )
    model = config.model
    group = model.kv_channels * model.hidden_size
    if model.key_value_heads < ranks.tensor and group % GAUSSIAN_BLOCK:
        raise FlagError(
            f"--num-query-groups {model.key_value_heads} with --tensor-model-parallel-size {ranks.tensor}: ranks share key heads of "
            f"{group} weights (--kv-channels {model.kv_channels} x --hidden-size {model.hidden_size}), which are no whole blocks of "
            f"{GAUSSIAN_BLOCK}, so codes of {PERIOD} would differ; choose --tensor-model-parallel-size {model.key_value_heads} or less, or "
            f"{exact}."
        )


def surprising_lengths(config: Config, batches: BatchSchedule) -> Iterator[str]:
    """Lines about outer steps that begin too early, or are too few."""
    diloco, train_iters = config.diloco, config.training.train_iters
    period, start = diloco.diloco_sync_period, diloco.diloco_start_iteration or 0
    if period is None:
        return
    warmup = warmup_iterations(config, batches)
    if start < warmup:
        yield (
            f"--diloco-start-iteration {start} is before the end of the warmup of the learning rate, iteration {warmup}: outer momentum "
            "that has seen a warmup alone throws the model away"
        )
    outer_steps = max(0, train_iters - start) // period
    if outer_steps < FEWEST_OUTER_STEPS and diloco.diloco_islands > 1:
        yield (
            f"{PERIOD} {period} makes {counted(outer_steps, 'outer step')} of each unit from iteration {start} to --train-iters "
            f"{train_iters}; islands with fewer than {FEWEST_OUTER_STEPS} steps learn much less than one world"
        )
