"""The closed form of what crosses the tensor link, against the table in its file. tests/training compares it with the ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.model.tensor_traffic import LOSS_BYTES, TensorTraffic, tensor_traffic
from megatron_zpp.parallel.link_work import LinkWork

LAYERS, HIDDEN, LENGTH, SAMPLES, ELEMENT_BYTES = 6, 64, 32, 2, 2
TOKENS = SAMPLES * LENGTH


def config(flags: str = "") -> ModelConfig:
    shape = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 8 --seq-length {LENGTH} --vocab-size 128 --mock-data"
    return resolve(parse_flags(f"{shape} {flags}".split()), 1, 1).model


def traffic(ranks: int, flags: str = "", *, sequence_parallel: bool = False, microbatches: int = 1) -> TensorTraffic:
    shape = ModelShape(config(flags), 128, ranks, 0, sequence_parallel)
    return tensor_traffic(shape, microbatches=microbatches, samples=SAMPLES, element_bytes=ELEMENT_BYTES)


def part_of_hidden(ranks: int) -> int:
    """r X of the table."""
    return (ranks - 1) * TOKENS * HIDDEN * ELEMENT_BYTES // ranks


def test_one_tensor_rank_receives_nothing() -> None:
    found = traffic(1, "--recompute-granularity full --recompute-method uniform")
    assert found.training == found.evaluation == LinkWork()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_recomputation_a_micro_batch_takes_8_sums_per_block_and_4_more_or_10_and_4_with_sequence_parallelism(ranks: int) -> None:
    loss = (ranks - 1) * LOSS_BYTES * TOKENS
    for sequence_parallel, per_block in ((False, 8), (True, 10)):
        found = traffic(ranks, sequence_parallel=sequence_parallel)
        assert found.training.nbytes == (per_block * LAYERS + 4) * part_of_hidden(ranks) + loss
        assert found.training.collectives == per_block * LAYERS + 4 + 1
        assert found.evaluation.nbytes == (4 * LAYERS + 2) * part_of_hidden(ranks) + loss
        assert found.recomputed == LinkWork()


@pytest.mark.parametrize(
    ("flags", "repeated_blocks", "chunks"),
    [
        ("--recompute-granularity selective", 0, 0),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", LAYERS, LAYERS),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", LAYERS, 2),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", 2, 2),
    ],
)
def test_recomputation_repeats_a_blocks_forward_but_not_the_last_sum_of_a_chunk(flags: str, repeated_blocks: int, chunks: int) -> None:
    for sequence_parallel, last_sum in ((False, 2), (True, 1)):
        found = traffic(4, flags, sequence_parallel=sequence_parallel).recomputed
        repeated = 4 * repeated_blocks - last_sum * chunks
        assert found == LinkWork(repeated * part_of_hidden(4), collectives=repeated)


@pytest.mark.parametrize(("recomputed", "chunks"), [("uniform --recompute-num-layers 4", 2), ("block --recompute-num-layers 3", 3)])
def test_divided_inputs_are_gathered_once_per_chunk_and_own_tokens_never(recomputed: str, chunks: int) -> None:
    flags = f"--recompute-granularity full --recompute-method {recomputed}"
    plain, divided = traffic(4, flags), traffic(4, f"{flags} --partition-activations")
    assert divided.inputs == LinkWork(chunks * part_of_hidden(4), collectives=chunks)
    assert divided.training == plain.training + divided.inputs and divided.evaluation == plain.evaluation
    assert traffic(4, f"{flags} --partition-activations", sequence_parallel=True).inputs == LinkWork() == plain.inputs


def test_the_loss_in_chunks_takes_as_many_bytes_in_more_gathers() -> None:
    whole, chunks = traffic(2).loss, traffic(2, "--loss-chunk-tokens 24").loss
    assert chunks.nbytes == whole.nbytes and (whole.collectives, chunks.collectives) == (1, 3)


def test_micro_batches_multiply() -> None:
    one, three = traffic(2), traffic(2, microbatches=3)
    assert three.training == 3 * one.training and three.evaluation == 3 * one.evaluation


def test_hidden_states_that_the_ranks_do_not_share_evenly_are_padded_to_16_bytes_for_each() -> None:
    shape = ModelShape(replace(config(), hidden_size=24, seq_length=3), 128, 4)
    found = tensor_traffic(shape, microbatches=1, samples=1, element_bytes=2)
    part = 48  # 3 x 24 x 2 bytes are 144, of which 4 ranks have 36 each
    assert found.backward.nbytes == (4 * LAYERS + 2) // 2 * 2 * 3 * part and found.backward.collectives == 4 * LAYERS + 2
