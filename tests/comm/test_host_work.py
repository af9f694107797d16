"""What a step costs the host on a device with streams: how often it waits, and how many operations it enqueues."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.machine import Launch, Site
from harness.small_engine import LEARNING_RATE, ROWS, Job, ModelShape, Rank

from megatron_zpp.ops import extension
from megatron_zpp.zero import optimizer_step
from megatron_zpp.zero.loss_scaler import DynamicLossScaler
from megatron_zpp.zero.norms import squared_sums_at_once
from megatron_zpp.zero.policy import POLICIES, ZEROPP

pytestmark = pytest.mark.virtual

ADAMW = Launch("adam.py", "aten::_fused_adamw_")
OF_THE_MODEL = ("autograd", "small_engine.py")


@dataclass(frozen=True)
class Step:
    """What the host did in one step, before and during its update."""

    backward: list[Launch | Site]
    update: list[Launch | Site]
    is_skipped: bool

    @property
    def waits(self) -> list[str]:
        return [f"{entry.call} at {entry.file}" for entry in [*self.backward, *self.update] if isinstance(entry, Site)]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of squares that a GPU gets; the tensors of these tests are on a CPU."""
    monkeypatch.setattr(optimizer_step, "squared_sums_for", lambda *_: squared_sums_at_once)


def job_of(policy_name: str, blocks: int = 2, **more: object) -> Job:
    policy = {**ROWS, "ZeRO++": ZEROPP}[policy_name]
    return replace(Job(policy, torch.bfloat16, ModelShape(inner=(16,) * blocks, is_tied=False), steps=2, microbatches=2), **more)


def train(job: Job, gpu: Gpu) -> list[Step]:
    rank = Rank(job, gpu.backend, lanes=gpu.lanes, streams=gpu.machine)
    steps = [one_step(rank, gpu, step) for step in range(job.steps)]
    rank.engine.close()
    return steps


def one_step(rank: Rank, gpu: Gpu, step: int) -> Step:
    log = gpu.machine.log
    begin = len(log)
    for microbatch in range(rank.job.microbatches):
        rank.backward(rank.loss(step, microbatch), microbatch)
    rank.engine.finish_gradients()
    after_backward = len(log)
    result = rank.engine.update(LEARNING_RATE)
    return Step(log[begin:after_backward], log[after_backward:], result.is_skipped)


@cache
def steps_of(job: Job, world: tuple[int, int] | None = None) -> list[Step]:
    """In a world of two links where weights cross one more often than the other; else in one of two ranks."""
    rests_at_one_rung = job.policy in (POLICIES[0], POLICIES[1], POLICIES[2])
    return run_on_gpus(world or ((2, 1) if rests_at_one_rung else (2, 2)), partial(train, job))[0]


def overflowing() -> DynamicLossScaler:
    """A loss scale with which the first steps of an fp16 run are skipped."""
    return DynamicLossScaler(scale=2.0**18, hysteresis=1)


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference computes, also if another test of this process has loaded kernels."""
    monkeypatch.setattr(extension, "has_kernels_for", lambda device_type: False)


# ---- waits


@pytest.mark.parametrize(
    "job",
    [*(job_of(name) for name in [*ROWS, "ZeRO++"]), job_of("stage 1", counts_zeros=True)],
    ids=[*ROWS, "ZeRO++", "zeros are counted"],
)
def test_the_host_waits_once_in_a_step(job: Job) -> None:
    assert [step.waits for step in steps_of(job)] == [["synchronize at host_link.py"]] * job.steps


def test_the_host_waits_once_in_an_fp16_step_whether_it_is_skipped_or_not() -> None:
    steps = steps_of(job_of("stage 3", 1, dtype=torch.float16, steps=5, microbatches=1, loss_scaler=overflowing), (1, 2))
    assert [step.waits for step in steps] == [["synchronize at host_link.py"]] * 5
    assert {step.is_skipped for step in steps} == {True, False}


@pytest.mark.parametrize("name", [*ROWS, "ZeRO++"])
def test_every_update_has_been_enqueued_when_the_host_waits_and_no_climb_has(name: str) -> None:
    for step in steps_of(job_of(name)):
        (wait,) = (place for place, entry in enumerate(step.update) if isinstance(entry, Site))
        before, after = step.update[:wait], step.update[wait:]
        assert before.count(ADAMW) == 4 and ADAMW not in after  # two updates, with and without weight decay in each
        assert not any(str(entry.operation).startswith("gather inter-climb") for entry in before if isinstance(entry, Launch))


# ---- launches


def launches(step: list[Launch | Site]) -> Counter[str]:
    """Operations other than the model's own."""
    return Counter(f"{entry.file} {entry.operation}" for entry in step if isinstance(entry, Launch) and entry.file not in OF_THE_MODEL)


def difference(more: Counter[str], less: Counter[str]) -> dict[str, int]:
    return {name: more[name] - less[name] for name in more | less if more[name] != less[name]}


def per_unit_and_microbatch(name: str, world: tuple[int, int] | None) -> dict[str, int]:
    """What a third block adds to a second micro-batch."""
    count = {
        (blocks, microbatches): launches(steps_of(job_of(name, blocks, microbatches=microbatches), world)[-1].backward)
        for blocks in (2, 3)
        for microbatches in (1, 2)
    }
    of_three, of_two = (Counter(difference(count[blocks, 2], count[blocks, 1])) for blocks in (3, 2))
    return difference(of_three, of_two)


# Each matrix as it comes, and all parameters of one dimension together.
ALONE = {"codec.py aten::copy_": 4, "gradients.py aten::_foreach_add_": 3}
# Climbs in forward and backward, and a descent, each over two links and with two regions. The means are the reference's; the kernel
# mean_values is one launch for each of the four.
CROSSING = {
    "gradients.py aten::_foreach_zero_": 1,  # paddings
    "gradients.py aten::_foreach_copy_": 3,
    "links.py gather inter-climb": 2,
    "links.py gather intra-climb": 2,
    "links.py exchange intra-descend": 1,
    "links.py exchange inter-descend": 1,
    "codec.py aten::copy_": 10,
    "reference.py aten::copy_": 6,
    "reference.py aten::add_": 6,
    "reference.py aten::full": 4,
    "reference.py aten::div_": 4,
}


@pytest.mark.parametrize(
    "name, world, expected",
    [("stage 3", (1, 1), ALONE), ("stage 3", None, CROSSING), ("stage 0", None, {"gradients.py aten::_foreach_add_": 3})],
    ids=["a world of one", "stage 3", "stage 0"],
)
def test_a_unit_costs_these_launches_in_each_micro_batch(name: str, world: tuple[int, int] | None, expected: dict[str, int]) -> None:
    assert per_unit_and_microbatch(name, world) == expected


@pytest.mark.parametrize("name", ["stage 2", "stage 3", "ZeRO++"])
def test_the_launches_of_an_update_do_not_grow_with_the_number_of_units(name: str) -> None:
    few, many = (launches(steps_of(job_of(name, blocks))[-1].update) for blocks in (2, 3))
    assert difference(many, few) == {}


UPDATE = {
    "norms.py aten::zeros": 1,
    "norms.py aten::_foreach_norm": 1,
    "norms.py aten::stack": 1,
    "norms.py aten::pow": 1,
    "norms.py aten::sum": 1,
    # What ranks tell each other of their calls.
    "step_calls.py aten::zeros": 1,
    "step_calls.py aten::fill_": 1,
    "step_calls.py aten::ne": 1,
    "step_calls.py aten::any": 1,
    "optimizer_step.py aten::masked_fill": 1,
    "norms.py aten::cat": 1,
    "links.py gather of the world": 1,
    "norms.py aten::clone": 1,
    "norms.py aten::cumsum": 2,  # over the units of a rank, and over the ranks
    "optimizer_step.py aten::cat": 1,
    "host_link.py aten::copy_": 1,
    "optimizer_step.py aten::sqrt": 1,
    "optimizer_step.py aten::div": 2,
    "optimizer_step.py aten::add": 1,
    "optimizer_step.py aten::reciprocal": 1,
    "optimizer_step.py aten::mul": 2,
    "optimizer_step.py aten::clamp": 1,
    "optimizer_step.py aten::_to_copy": 2,
    "optimizer_step.py aten::abs": 1,
    "optimizer_step.py aten::ne": 1,
    "optimizer_step.py aten::eq": 1,
    "optimizer_step.py aten::logical_not": 1,
    # Twice: the units that the next step needs first, and all others. AdamW: with and without weight decay.
    "optimizer.py aten::_foreach_mul_": 2,
    "adam.py aten::_foreach_add_": 4,
    "adam.py aten::_fused_adamw_": 4,
    "adam.py aten::_foreach_sub_": 4,
}


def test_an_update_costs_these_launches_besides_the_first_climbs() -> None:
    found = launches(steps_of(job_of("stage 3"))[-1].update)
    climbs = {name: count for name, count in found.items() if name.startswith("codec.py") or "climb" in name}
    assert found == UPDATE | climbs
