"""A plan of a model with layers left out is that of all its layers: memory, bytes, collectives and operations."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_zpp.comm.ledger import Category
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.plan import planned_step
from megatron_zpp.training.plan.kinds import OTHER
from megatron_zpp.training.plan.planned_step import PlannedStep, plan_step
from megatron_zpp.training.sharding import grid_of

pytestmark = pytest.mark.pure

VOCAB, RANKS, RANKS_PER_NODE = 96, 8, 4
MODEL = (
    f"--hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size {VOCAB} --make-vocab-size-divisible-by 8 --mock-data "
    f"--train-iters 10 --attention-dropout 0 --hidden-dropout 0 --quantization-block-size 256 --micro-batch-size 2 --ranks-per-node "
    f"{RANKS_PER_NODE}"
)
FULL = "--recompute-granularity full"
PAIR = "--tensor-model-parallel-size 2"
# Flags, layers, and whether on GPUs. Each flag stands beside others that could get in its way.
CASES = [
    ("--zero-stage 3", 8, False),
    ("--zero-stage 3 --bf16 --global-batch-size 64", 8, True),
    (f"--zero-stage 3 --bf16 {FULL} --recompute-num-layers 1", 8, False),
    (f"--zeropp paper --bf16 {FULL} --recompute-num-layers 2 --global-batch-size 32", 12, True),
    (f"--zero-stage 3 {FULL} --recompute-num-layers 3", 17, True),
    (f"--zero-stage 3 {FULL} --recompute-method block --recompute-num-layers 6", 12, True),
    (f"--zeropp lean --bf16 {FULL} --recompute-method block --recompute-num-layers 6", 12, False),
    ("--zero-stage 2 --bf16 --recompute-activations", 8, True),
    ("--zero-stage 3 --zero-prefetch-units 0 --zero-prefetch-units-intra 0 --attention-backend unfused", 8, True),
    ("--zeropp paper --zero-prefetch-units 6 --zero-prefetch-units-intra 4", 15, False),
    ("--zero-stage 0 --bf16 --global-batch-size 48", 8, False),
    ("--zero-stage 1 --bf16 --global-batch-size 64", 8, False),
    ("--zeropp lean --bf16 --zero-gradients-between-microbatches secondary --global-batch-size 64", 8, True),
    ("--zero-stage 3 --optimizer-cpu-offload --bf16", 8, True),
    ("--zeropp lean --optimizer-cpu-offload --bf16", 8, True),
    (f"--zero-stage 3 {PAIR} --sequence-parallel", 8, False),
    (f"--zero-stage 1 --bf16 {PAIR}", 8, True),
    ("--zero-stage 3 --context-parallel-size 2 --bf16", 8, True),
    (f"--zero-stage 3 {PAIR} {FULL} --recompute-num-layers 1 --partition-activations --contiguous-checkpointing", 8, True),
    (f"--zero-stage 3 {PAIR} {FULL} --recompute-num-layers 1 --partition-activations --checkpoint-in-cpu", 8, True),
]
SCALARS = 32  # bytes that a unit may have beside its state


def planned(flags: str, layers: int, *, is_on_gpu: bool) -> PlannedStep:
    config = resolve(parse_flags(f"{MODEL} --num-layers {layers} {flags}".split()), RANKS, RANKS_PER_NODE)
    return plan_step(config, grid_of(config, RANKS), VOCAB, is_on_gpu=is_on_gpu)


def without_scalars(memory: Any) -> tuple[dict[str, int], dict[str, int]]:
    on_device, on_host = (
        {kind: nbytes for kind, nbytes in part.items() if nbytes and kind != OTHER} for part in (memory.on_device, memory.on_host)
    )
    return on_device, on_host


@pytest.mark.parametrize(("flags", "layers", "is_on_gpu"), CASES)
def test_a_plan_with_layers_left_out_is_that_of_all_layers(
    flags: str, layers: int, is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(flags, layers, is_on_gpu=is_on_gpu)
    assert sum(repeat.times * len(repeat.blocks) for repeat in found.repeats) > 0
    monkeypatch.setattr(planned_step, "without_repeats", lambda model, prefetch: (model, ()))
    whole = planned(flags, layers, is_on_gpu=is_on_gpu)
    assert whole.repeats == ()
    assert without_scalars(found.memory) == without_scalars(whole.memory)
    assert abs(found.memory.total - whole.memory.total) <= SCALARS * layers
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.ACTIVATIONS, Category.EXCHANGES):
        assert found.traffic(category) == whole.traffic(category)
    assert (found.collectives, found.flops) == (whole.collectives, whole.flops)


def test_a_model_with_too_few_layers_is_planned_whole() -> None:
    assert planned("--zero-stage 3", 3, is_on_gpu=False).repeats == ()
