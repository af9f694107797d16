"""Where a plan has the inputs of recomputed chunks, by flag: the table of docs/recomputation.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.kept_inputs import kept_inputs_shape
from megatron_zpp.training.plan.kinds import ACTIVATIONS, KEPT_INPUTS
from megatron_zpp.training.plan.planned_step import PlannedMemory, plan_step
from megatron_zpp.training.sharding import grid_of

pytestmark = pytest.mark.pure

SAMPLES, RANKS, LENGTH, HIDDEN, CHUNKS = 3, 4, 32, 64, 6
WHOLE = SAMPLES * LENGTH * HIDDEN * 2
PART = WHOLE // RANKS
MODEL = (
    f"--num-layers {CHUNKS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {LENGTH} --vocab-size 64 --mock-data --bf16 "
    "--train-iters 10 --make-vocab-size-divisible-by 8 --attention-dropout 0 --hidden-dropout 0 --zero-stage 3 "
    f"--micro-batch-size {SAMPLES}"
)
PARTS, HOST, PLACES = "--partition-activations", "--checkpoint-in-cpu", "--contiguous-checkpointing"


def memory_of(
    *switches: str, is_on_gpu: bool = True, ranks: int = RANKS, recomputes: str = "--recompute-granularity full"
) -> PlannedMemory:
    flags = f"{MODEL} --tensor-model-parallel-size {ranks} --ranks-per-node {ranks} {recomputes} {' '.join(switches)}"
    config = resolve(parse_flags(flags.split()), ranks, ranks)
    return plan_step(config, grid_of(config, ranks), 64, is_on_gpu=is_on_gpu).memory


def kept(*switches: str, **others: Any) -> tuple[int, int]:
    """Bytes of lasting places on the device and on its host."""
    memory = memory_of(*switches, **others)
    return memory.on_device.get(KEPT_INPUTS, 0), memory.on_host.get(KEPT_INPUTS, 0)


def test_lasting_places_have_the_bytes_of_the_table() -> None:
    assert kept() == (0, 0) == kept(PARTS)  # autograd keeps them
    assert kept(PLACES) == (CHUNKS * WHOLE, 0)
    assert kept(PLACES, PARTS) == (CHUNKS * PART, 0)
    for places in ((), (PLACES,)):
        assert kept(HOST, *places) == (0, CHUNKS * WHOLE)
        assert kept(HOST, PARTS, *places) == (0, CHUNKS * PART)
        assert kept(HOST, *places, is_on_gpu=False) == (CHUNKS * WHOLE, 0)  # the device is the host


def test_one_rank_and_sequence_parallelism_divide_nothing_again() -> None:
    assert memory_of(PARTS, ranks=1).total == memory_of(ranks=1).total
    own = memory_of("--sequence-parallel")
    assert own.total == memory_of("--sequence-parallel", PARTS).total


def test_a_rank_keeps_one_input_of_each_chunk_and_without_chunks_nothing() -> None:
    assert kept(PLACES, recomputes="--recompute-granularity full --recompute-num-layers 4") == (2 * WHOLE, 0)
    assert kept(PLACES, recomputes="--recompute-granularity full --recompute-method block --recompute-num-layers 1") == (WHOLE, 0)


def test_inputs_that_are_kept_in_parts_or_on_the_host_are_not_among_activations() -> None:
    plain = memory_of().on_device[ACTIVATIONS]
    for switches in ((PARTS,), (HOST,), (PLACES,), (PARTS, HOST)):
        assert memory_of(*switches).on_device[ACTIVATIONS] < plain


def test_parts_are_padded_to_16_bytes() -> None:
    config = resolve(
        parse_flags(f"{MODEL} --recompute-granularity full {PARTS} --tensor-model-parallel-size 4".split()), RANKS, RANKS
    ).model
    odd = kept_inputs_shape(replace(config, hidden_size=3, seq_length=1), SAMPLES, RANKS, sequence_parallel=False)
    assert odd.part_numel(element_bytes=2) * 2 == 16
