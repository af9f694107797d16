"""A parameter that no rank's loss reaches in a step is passed over, as by plain AdamW, in every row."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.fake_streams.gpus import run_on_gpus
from harness.small_engine import CLIP_GRAD, GLOBAL_BATCH, LEARNING_RATE, ROWS, Job, ModelShape, Rank, global_batch, plain_model
from harness.small_state import Gathering
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.comm.backend import Backend
from megatron_zpp.comm.code import Code
from megatron_zpp.zero.policy import POLICIES, ZEROPP, with_offloaded_optimizer, with_secondary_weights, with_weight_differences

pytestmark = pytest.mark.virtual

SHAPE = ModelShape(inner=(17, 5), is_tied=False, has_spare=True)
EXACT = {
    **ROWS,
    "hpZ": with_secondary_weights(POLICIES[3]),
    "stage 1, offloaded": with_offloaded_optimizer(POLICIES[1]),
    "stage 3, offloaded": with_offloaded_optimizer(POLICIES[3]),
}
LOSSY = {"ZeRO++": ZEROPP, "differences": with_weight_differences(with_secondary_weights(POLICIES[3]), Code(8))}
USERS = [4, 4, 0, 0, 1, 0, 4]  # ranks whose loss reaches the spare parameters, in each step
BIAS = "blocks.0.up.bias"  # it shares blocks with others; no loss reaches it in steps 2 and 3


class Sometimes(Rank):
    """Uses the spare parameters and a bias in some steps only."""

    def loss(self, step: int, microbatch: int = 0) -> Tensor:
        self.uses_spare = self.backend.rank < USERS[step] * self.backend.grid.world_size / 4
        bias = self.model.get_parameter(BIAS)
        self.model.blocks[0].up.forward = lambda hidden: _linear(self.model.blocks[0].up, hidden, bias, step)
        return super().loss(step, microbatch)


def _linear(layer: torch.nn.Linear, hidden: Tensor, bias: Tensor, step: int) -> Tensor:
    return torch.nn.functional.linear(hidden, layer.weight, bias.detach() if step in (2, 3) else bias)


@cache
def plainly() -> tuple[list[float], dict[str, Tensor]]:
    """Norms of each step, and the weights after the last one, of torch's own loop."""
    model = plain_model(SHAPE)
    decayed, others = ([each for each in model.parameters() if (each.ndim > 1) is decays] for decays in (True, False))
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=LEARNING_RATE)
    norms = []
    for step, users in enumerate(USERS):
        tokens, labels = global_batch(step)
        layer = model.blocks[0].up
        layer.forward = lambda hidden, layer=layer, step=step: _linear(layer, hidden, layer.bias, step)
        optimizer.zero_grad()
        for part in range(4):
            rows = slice(part * GLOBAL_BATCH // 4, (part + 1) * GLOBAL_BATCH // 4)
            (model(tokens[rows], labels[rows], part < users) / 4).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD).item())
        optimizer.step()
    return norms, {name: parameter.detach().flatten() for name, parameter in model.named_parameters()}


def trained(rank: Rank, first: int = 0, last: int = len(USERS)) -> list[float]:
    """The norm of each step."""
    norms = [rank.step(step)[1].grad_norm for step in range(first, last)]
    rank.engine.finish_updates()
    return norms


def check_weights(rank: Rank, expected: dict[str, Tensor]) -> None:
    for name, pieces in rank.own_main_weights().items():
        for start, values in pieces:
            torch.testing.assert_close(values, expected[name][start : start + values.numel()], rtol=2e-4, atol=2e-5)


Weights = dict[tuple[str, int], float]  # by parameter and place


def program(row: str, backend: Backend, **parts: Any) -> tuple[list[float], Weights]:
    """The norm of each step, and the weights that the rank owns after the last one; in worlds of four ranks, those of plain AdamW."""
    rank = Sometimes(Job(EXACT[row], shape=SHAPE), backend, **parts)
    found = trained(rank)
    if backend.grid.world_size == 4:
        norms, weights = plainly()
        assert found == pytest.approx(norms, rel=2e-5)
        check_weights(rank, weights)
    assert rank.engine.optimizer.unused_steps == {"blocks.0.spare": 3, "blocks.1.spare": 3, BIAS: 2}
    rank.engine.close()
    return found, {
        (name, start + place): value
        for name, pieces in rank.own_main_weights().items()
        for start, values in pieces
        for place, value in enumerate(values.tolist())
    }


@cache
def run(world: tuple[int, int], row: str) -> list[tuple[list[float], Weights]]:
    return run_world(world, partial(program, row))


@pytest.mark.parametrize("row", EXACT)
def test_weights_are_those_of_plain_adamw_which_passes_over_what_has_no_gradient(row: str) -> None:
    """Also when a parameter is used again: the bias of its moments is corrected by the number of its own updates."""
    assert len(run((2, 2), row)) == 4


@pytest.mark.parametrize("world", [(2, 2), (3, 1), (1, 1)], ids=str)
def test_every_stage_gives_the_same_bits(world: tuple[int, int]) -> None:
    """Although a slice of the bias, which shares blocks with parameters that have had more updates, begins elsewhere in each."""

    def whole(row: str) -> Weights:
        return {key: value for _, weights in run(world, row) for key, value in weights.items()}

    assert whole("stage 0") == whole("stage 1") == whole("stage 3") == whole("stage 3, offloaded")


SAVED_AT = 5  # after steps that have passed each of them over; from then on all ranks use the spare parameters, or none, in any world


@pytest.mark.parametrize(
    ("world", "row"), [((1, 1), "stage 0"), ((3, 1), "stage 1"), ((2, 2), "stage 3, offloaded"), ((1, 2), "hpZ")], ids=str
)
def test_a_run_that_resumes_in_another_world_goes_on_as_if_it_had_not_been_saved(tmp_path: Path, world: tuple[int, int], row: str) -> None:
    norms, weights = plainly()
    gathering = Gathering(4)

    def save(backend: Backend) -> None:
        rank = Sometimes(Job(POLICIES[3], shape=SHAPE), backend)
        assert trained(rank, 0, SAVED_AT) == pytest.approx(norms[:SAVED_AT], rel=2e-5)
        saver = CheckpointSaver(tmp_path, EngineState(rank.engine).share(with_moments=True), SaveOptions(), gathering.of(backend.rank))
        saver.save(EngineState(rank.engine).manifest(Progress(SAVED_AT, 96, 96), {}, with_moments=True))
        rank.engine.close()

    def resume(backend: Backend) -> None:
        rank = Sometimes(Job(EXACT[row], shape=SHAPE), backend)
        rank.engine.start_iteration(SAVED_AT)
        with CheckpointReader(iteration_folder(tmp_path, SAVED_AT)) as reader:
            assert reader.manifest.run["unused_steps"] == {"blocks.0.spare": 2, "blocks.1.spare": 2, BIAS: 2}
            EngineState(rank.engine).load(reader, with_moments=True)
        assert trained(rank, SAVED_AT) == pytest.approx(norms[SAVED_AT:], rel=2e-5)
        check_weights(rank, weights)
        assert rank.engine.optimizer.unused_steps == {"blocks.0.spare": 3, "blocks.1.spare": 3, BIAS: 2}
        rank.engine.close()

    run_world((2, 2), save)
    run_world(world, resume)


@pytest.mark.parametrize("row", LOSSY)
def test_codes_that_mix_neighbours_do_not_move_it_either(row: str) -> None:
    def program(backend: Backend) -> None:
        rank = Sometimes(Job(LOSSY[row], shape=SHAPE), backend)
        seen = []
        for step in range(5):
            rank.step(step)
            pieces = rank.own_main_weights()
            seen.append([values for name in ("blocks.0.spare", "blocks.1.spare", BIAS) for _, values in pieces.get(name, [])])
        for before, after in ((1, 2), (2, 3)):  # in steps 2 and 3 nobody uses them
            assert all(torch.equal(*values) for values in zip(seen[before], seen[after], strict=True))
        assert not seen[0] or not all(torch.equal(*values) for values in zip(seen[3], seen[4], strict=True))
        rank.engine.close()

    run_world((2, 2), program)


def test_on_streams_the_bits_are_those_without_streams() -> None:
    on_streams = run_on_gpus((2, 2), lambda gpu: program("stage 3", gpu.backend, lanes=gpu.lanes, streams=gpu.machine))
    assert on_streams == run((2, 2), "stage 3")
