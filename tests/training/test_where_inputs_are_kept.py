"""Runs that keep inputs of recomputed chunks and the optimizer elsewhere: the bits of a run that does not, and the bytes of the plan."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from harness.fake_streams.machine import Machine, Site
from harness.fake_streams.one_gpu import run_on_one_fake_gpu
from harness.live_bytes import LiveBytes
from harness.worlds import TurnLanes, run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.kept_places import Arena, HostPlaces
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training import kept_inputs
from megatron_zpp.training.kept_inputs import about_kept_inputs, build_kept_inputs
from megatron_zpp.training.memory_need import memory_need
from megatron_zpp.training.plan.kinds import KEPT_INPUTS
from megatron_zpp.training.sharding import grid_of
from megatron_zpp.training.step import token_losses
from testbed.session import RankPlace, Session

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
TINY = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 40 --make-vocab-size-divisible-by 8 --mock-data "
    "--train-iters 10 --attention-dropout 0 --quantization-block-size 32 --micro-batch-size 2 --checkpoint-activations"
)
STEPS = 2  # the second uses every place again, and the weights after it are compared
ALL = "--partition-activations --checkpoint-in-cpu --contiguous-checkpointing"
SWITCHES = ["--partition-activations", "--checkpoint-in-cpu", "--contiguous-checkpointing", ALL]
OFFLOAD = "--optimizer-cpu-offload"
FP16 = "--fp16 --initial-loss-scale 262144 --hysteresis 1"  # skips the first step
PAIR, TWO_PAIRS = Grid.of_nodes(1, 2, 2), Grid.of_nodes(1, 4, 2)
ROWS = {
    "stage 0, 2 tensor ranks": ("--zero-stage 0", PAIR),
    "stage 1, a skipped step": (f"--zero-stage 1 {FP16}", PAIR),
    "stage 2, 2 x 2": ("--zero-stage 2 --bf16 --global-batch-size 4", TWO_PAIRS),
    "stage 3, 2 x 2, micro-batches, chunks of two": ("--zero-stage 3 --bf16 --global-batch-size 8 --recompute-num-layers 2", TWO_PAIRS),
    "ZeRO++, whole layers": ("--zeropp paper --bf16", Grid.of_nodes(2, 2)),
    "lean, 2 nodes of a pair": ("--zeropp lean --zero-stage 2 --bf16 --quantization-block-size 256", Grid.of_nodes(2, 2, 2)),
    "stage 3, 4 tensor ranks": ("--zero-stage 3", Grid.of_nodes(1, 4, 4)),
}
History = tuple[tuple[str, str], ...]  # written out: a norm may be infinite or NaN


def trained(session: Session) -> tuple[History, str]:
    """Losses, gradient norms and a digest of the weights; evaluates between the steps."""
    history = []
    for step in range(STEPS):
        loss, norm = session.step(step)
        history.append((loss.hex(), norm.hex()))
        session.model.eval()
        with torch.no_grad():
            token_losses(session.model, session.batch(step), CPU)
        session.model.train()
    digest = session.weights_digest()
    session.close()
    return tuple(history), digest


def run(flags: str, grid: Grid) -> list[tuple[History, str]]:
    def program(backend: VirtualBackend) -> tuple[History, str]:
        sizes = f"--ranks-per-node {grid.ranks_per_node} --tensor-model-parallel-size {grid.tensor_ranks}"
        return trained(Session(f"{TINY} {flags} {sizes}", RankPlace(backend, TurnLanes(), CPU)))

    return run_world(grid, program)


@cache
def plain(row: str) -> list[tuple[History, str]]:
    return run(*ROWS[row])


def everything(row: str) -> str:
    """All switches that the row can have."""
    return ALL if "stage 0" in row else f"{ALL} {OFFLOAD}"


# Every row with all switches at once; each switch alone where it takes the most turns.
TURNS = "stage 3, 2 x 2, micro-batches, chunks of two"
PAIRS = [*((row, everything(row)) for row in ROWS), *((TURNS, switch) for switch in [*SWITCHES[:-1], OFFLOAD])]


@pytest.mark.parametrize(("row", "switches"), PAIRS)
def test_no_switch_changes_a_bit_of_a_run_that_evaluates_between_its_steps(row: str, switches: str) -> None:
    flags, grid = ROWS[row]
    assert run(f"{flags} {switches}", grid) == plain(row)


def test_the_row_with_a_skipped_step_skips_one_and_not_all() -> None:
    is_finite = [math.isfinite(float.fromhex(norm)) for _, norm in plain("stage 1, a skipped step")[0][0]]
    assert not is_finite[0] and is_finite[-1]


@pytest.mark.long
@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("row", ROWS)
def test_no_switch_changes_a_bit_in_any_row(row: str, switches: str) -> None:
    flags, grid = ROWS[row]
    assert run(f"{flags} {switches}", grid) == plain(row)


def program_on_gpu(flags: str, place: RankPlace, machine: Machine) -> tuple[History, str]:
    return trained(Session(f"{TINY} {flags} --ranks-per-node 2 --tensor-model-parallel-size 2", place))


def run_on_gpu(flags: str, without: Site | None = None) -> tuple[list[tuple[History, str]], set[Site]]:
    return run_on_one_fake_gpu(PAIR, partial(program_on_gpu, flags), without=without)


@pytest.mark.parametrize("switches", ["--checkpoint-in-cpu", f"{ALL} {OFFLOAD}"])
def test_on_streams_the_host_keeps_inputs_without_a_race_and_with_the_same_bits(switches: str) -> None:
    flags = "--zero-stage 3 --global-batch-size 4"
    found, needed = run_on_gpu(f"{flags} {switches}")
    assert found == run(flags, PAIR)
    assert {"wait_event", "wait_stream"} <= {site.call for site in needed if site.file == "kept_places.py"}


# ---- plans and places


def resolved(flags: str, ranks: int = 2) -> Config:
    return resolve(parse_flags(f"{TINY} --zero-stage 3 --tensor-model-parallel-size {ranks} {flags}".split()), ranks, ranks)


@pytest.mark.parametrize("switches", [*SWITCHES[1:], "--partition-activations --contiguous-checkpointing"])
@pytest.mark.parametrize("has_host", [False, True], ids=["CPU", "device with a host"])
def test_places_are_made_at_the_start_with_the_bytes_of_the_plan(switches: str, has_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved(switches)
    tensors = memory_need(config, 40, grid_of(config, 2), is_on_gpu=has_host).tensors
    lasting, on_host = (kinds.get(KEPT_INPUTS, 0) for kinds in (tensors.on_device, tensors.on_host))
    made: list[Any] = []
    make = kept_inputs.make_places

    def noting(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(kept_inputs, "make_places", noting)

    def program(backend: VirtualBackend) -> int:
        streams = Machine() if has_host else None
        links = Links(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU, streams)
        with LiveBytes() as live:
            kept = build_kept_inputs(config, torch.float32, links)
            assert kept is not None
            return live.now

    on_device = run_world(PAIR, program)
    is_on_host = has_host and "in-cpu" in switches
    assert [type(places) for places in made] == [HostPlaces if is_on_host else Arena] * 2
    assert {places.nbytes for places in made} == {on_host if is_on_host else lasting}
    assert on_device == [lasting] * 2 and (on_host > 0) == is_on_host


def test_without_a_switch_and_where_nothing_is_divided_autograd_keeps_the_inputs() -> None:
    def program(backend: VirtualBackend) -> list[bool]:
        links = Links(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU)
        flags = ["", "--sequence-parallel --partition-activations"]
        return [build_kept_inputs(resolved(switches), torch.float32, links) is None for switches in flags]

    assert run_world(PAIR, program) == [[True, True]] * 2


def test_a_device_that_is_the_host_is_told_that_nothing_moves() -> None:
    assert "nothing is moved" in about_kept_inputs(resolved("--checkpoint-in-cpu"), CPU)
    assert about_kept_inputs(resolved("--checkpoint-in-cpu"), torch.device("cuda")) == "" == about_kept_inputs(resolved(""), CPU)
