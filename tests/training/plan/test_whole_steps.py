"""The planned peak of whole steps of training against the most that real ranks of a virtual world have at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from harness.live_rank import Held, LiveStorages, held_by_ranks, held_in_steps
from harness.planned_rank import check_peak, peak_of, recorded, run_of, states_of
from harness.small_engine import Job
from harness.worlds import run_world
from torch import Tensor, nn

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.ops import extension
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.plan.planned_step import plan_step
from megatron_zpp.training.step import token_losses
from megatron_zpp.zero.module_plan import plan_of
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.shard import shard
from testbed.session import Session

pytestmark = pytest.mark.virtual

VOCAB = 96
MODEL = (
    f"--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size {VOCAB} --make-vocab-size-divisible-by 8 "
    "--mock-data --train-iters 10 --hidden-dropout 0 --quantization-block-size 64 --micro-batch-size 2"
)
PLAIN = "--attention-dropout 0"
FULL = "--recompute-granularity full"
LLAMA = "--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear"
PAIR = "--tensor-model-parallel-size 2"
CASES = [
    (f"{PLAIN} --zero-stage 3", Grid.of_nodes(2, 2)),
    (f"{PLAIN} --zero-stage 0 --bf16", Grid.of_nodes(1, 2)),
    (f"{PLAIN} --zero-stage 2 --bf16 --global-batch-size 16 --attention-backend unfused", Grid.of_nodes(2, 2)),
    (f"{PLAIN} --zeropp paper --bf16 {LLAMA}", Grid.of_nodes(2, 2)),
    (f"{PLAIN} --zeropp lean --bf16 --quantization-block-size 256 --num-query-groups 2 --group-query-attention", Grid.of_nodes(2, 2)),
    (f"--attention-dropout 0.1 --zero-stage 3 --bf16 {FULL} --recompute-num-layers 1", Grid.of_nodes(2, 1)),
    (f"{PLAIN} --zero-stage 3 --optimizer-cpu-offload --bf16 --loss-chunk-tokens 50", Grid.of_nodes(1, 2)),
    (f"{PLAIN} --zero-stage 1 --bf16 --squared-relu --qk-layernorm", Grid.of_nodes(1, 1)),
    (f"{PLAIN} --zero-stage 3 {PAIR} --sequence-parallel {LLAMA}", Grid.of_nodes(1, 2, 2)),
    (f"{PLAIN} --zero-stage 1 --tensor-model-parallel-size 8 --sequence-parallel --num-attention-heads 8", Grid.of_nodes(1, 8, 8)),
    (f"{PLAIN} --zero-stage 3 --context-parallel-size 2 --bf16", Grid.of_nodes(1, 2, 1, 2)),
    (f"{PLAIN} --zero-stage 3 {FULL} --recompute-num-layers 2 --partition-activations {PAIR}", Grid.of_nodes(1, 2, 2)),
]


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Plans are of ranks whose kernels are built; those in Python make more tensors."""
    extension.load()


def flags_of(case: str, grid: Grid) -> str:
    return f"{MODEL} {case} --ranks-per-node {grid.ranks_per_node}"


def planned(flags: str, grid: Grid, vocabulary: int = VOCAB) -> Mapping[str, int]:
    """Bytes by kind."""
    config = resolve(parse_flags(flags.split()), grid.world_size, grid.ranks_per_node)
    return plan_step(config, grid, vocabulary, is_on_gpu=False).memory.on_device


@pytest.mark.parametrize(("case", "grid"), CASES, ids=str)
def test_the_planned_peak_of_a_step_holds_the_measured_one_and_without_buffers_at_most_7_percent_more(case: str, grid: Grid) -> None:
    flags = flags_of(case, grid)
    check_peak(planned(flags, grid), held_by_ranks(flags, grid))


def test_a_gradient_of_16_bits_counts_once() -> None:
    """That of a head of 4096 words is larger than all activations of a chunk of 16 tokens."""
    grid, words = Grid.of_nodes(1, 2), 4096
    untied = "--untie-embeddings-and-output-weights --loss-chunk-tokens 16 --num-layers 1 --seq-length 32"
    flags = flags_of(f"{PLAIN} --zero-stage 3 --bf16 {untied} --vocab-size {words}", grid)
    measured = max(rank.peak for rank in held_by_ranks(flags, grid))
    assert sum(planned(flags, grid, words).values()) == pytest.approx(measured, rel=1e-3)


def evaluate(session: Session) -> None:
    """Evaluates one micro-batch of --eval-micro-batch-size samples."""
    session.model.eval()
    batch = session.batch(0)
    times = session.config.training.eval_micro_batch_size // len(batch.tokens)
    tokens, labels, mask = (values.repeat(times, 1) for values in (batch.tokens, batch.labels, batch.loss_mask))
    with torch.no_grad():
        token_losses(session.model, replace(batch, tokens=tokens, labels=labels, loss_mask=mask), torch.device("cpu"))
    session.model.train()


@pytest.mark.parametrize("samples", [2, 64])
def test_a_plan_holds_evaluation_whose_micro_batches_may_be_larger(samples: int) -> None:
    grid = Grid.of_nodes(1, 2)
    flags = flags_of(f"{PLAIN} --zero-stage 3 {FULL} --eval-micro-batch-size {samples} --eval-global-batch-size {2 * samples}", grid)
    check_peak(planned(flags, grid), held_by_ranks(flags, grid, after_step=evaluate))


def test_a_compiled_run_is_planned_as_the_same_run_without_compilation() -> None:
    grid = Grid.of_nodes(1, 2)
    plain, compiled = (planned(flags_of(f"{PLAIN} --zero-stage 3 {switch}", grid), grid) for switch in ("", "--compile"))
    assert plain == compiled


# ---- any module


class Odd(nn.Module):
    """Normalizes without gains and mixes tokens by running sums, which no flag asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 96)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(96, 384), nn.Tanh(), nn.Linear(384, 96)) for _ in range(3))
        self.head = nn.Linear(96, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(nn.functional.layer_norm(hidden, (96,)).cumsum(1).softmax(-1))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


UNITS = ["embedding", "layers.0", "layers.1", "layers.2", "head"]


def test_any_module_of_shard_is_planned_by_its_record() -> None:
    grid, job = Grid.of_nodes(1, 1), Job(POLICIES[3], torch.float32, block_numel=64)

    def program(backend: VirtualBackend) -> Held:
        with LiveStorages() as live:
            torch.manual_seed(1)
            module = Odd()
            engine = shard(module, UNITS, job.options(), backend=backend)

            def accumulate(step: int) -> None:
                engine.backward(module(torch.zeros(8, 32, dtype=torch.int64)))
                engine.finish_gradients()

            return held_in_steps(live, engine, accumulate, lambda: engine.update(1e-3), engine.close)

    held = run_world(grid, program)
    with torch.device("meta"):
        module, tokens = Odd(), torch.zeros(8, 32, dtype=torch.int64)
    plan = plan_of(module, UNITS, None, lambda name, shape: torch.empty(shape, device="meta"))
    step = run_of(recorded(module, plan.unit_specs, plan.uses, lambda: module(tokens)), job.options(), grid)
    assert {rank.states for rank in held} == {sum(states_of(step).values())}
    check_peak(peak_of(step).by_kind, held)
