from __future__ import annotations

import pytest
import torch
from harness.codes import CodeOptions, LinkBits
from harness.small_engine import ROWS, Job, ModelShape, Rank
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.policy import POLICIES, with_quantized_gradients

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("shape, microbatches", [((1, 1), 1), ((2, 1), 2), ((3, 2), 1)], ids=str)
def test_model_state_at_the_end_of_backward_follows_the_policy_table(shape: tuple[int, int], microbatches: int) -> None:
    world_size = shape[0] * shape[1]
    bytes_per_parameter = {  # working weights 2 bytes, main weights 4, moments 8, gradient sums 4
        "stage 0": 2 + 4 + 8 + 4,
        "stage 1": 2 + 4 + 12 / world_size,
        "stage 2": 2 + 16 / world_size,
        "stage 3": 16 / world_size,
        "secondary row": 12 / world_size + 4 / shape[1] + (0 if world_size == 1 else 2 / shape[1]),  # one rank has no use for a copy
    }

    def program(backend: VirtualBackend, row: str) -> tuple[int, int]:
        rank = Rank(Job(ROWS[row], torch.bfloat16, microbatches=microbatches), backend)
        rank.accumulate(0)
        rank.engine.finish_gradients()
        nbytes = rank.engine.state_bytes().device
        rank.engine.close()
        return nbytes, sum(unit.layout.numel for unit in rank.engine.units)

    for row, expected in bytes_per_parameter.items():
        for nbytes, padded_parameters in run_world(shape, lambda backend: program(backend, row)):  # noqa: B023
            assert nbytes == pytest.approx(expected * padded_parameters, rel=1e-12), row


def _weights_above_the_shards(rank: Rank) -> int:
    return sum(
        tensor.untyped_storage().nbytes() for unit in rank.engine.units for tensor in unit.live_tensors() if tensor is not unit.main_weight
    )


def _peaks(backend: VirtualBackend, layers: int, is_recomputed: bool) -> tuple[int, int]:
    """Most bytes of gathered weights at any use, and all staging ever allocated in units of a block."""
    rank = Rank(Job(POLICIES[3], shape=ModelShape(inner=(20,) * layers, is_recomputed=is_recomputed), microbatches=2), backend)
    seen = []
    for module in (*rank.model.blocks, rank.model.final):
        for register in (module.register_forward_pre_hook, module.register_forward_hook, module.register_full_backward_pre_hook):
            register(lambda *_: seen.append(_weights_above_the_shards(rank)))  # type: ignore[operator]
    for step in range(2):
        rank.step(step)
    rank.engine.close()
    block_bytes = rank.engine.units[1].layout.numel * 4
    return max(seen), rank.engine.links.staging.allocated_bytes // block_bytes


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["kept", "recomputed"])
def test_gathered_weights_and_staging_of_stage_3_do_not_grow_with_depth(is_recomputed: bool) -> None:
    results = {layers: run_world((2, 2), lambda backend: _peaks(backend, layers, is_recomputed)) for layers in (4, 7)}  # noqa: B023
    assert len({peak for ranks in results.values() for peak, _ in ranks}) == 1
    # Under way at most, each with what it sends and receives: three descents, a climb on each link; a block that kept its own would need 4.
    assert all(blocks_of_staging <= 20 for ranks in results.values() for _, blocks_of_staging in ranks)


@pytest.mark.parametrize("shape, is_recomputed", [((1, 1), True), ((2, 1), False), ((2, 2), True), ((2, 2), False)], ids=str)
def test_after_backward_stage_3_holds_no_storage_above_its_shards(shape: tuple[int, int], is_recomputed: bool) -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(POLICIES[3], shape=ModelShape(is_recomputed=is_recomputed)), backend)
        for step in range(2):
            rank.accumulate(step)
            assert _weights_above_the_shards(rank) == 0
            rank.engine.step(1e-2)
        rank.engine.close()

    run_world(shape, program)


@pytest.mark.parametrize("row", ["stage 3", "secondary row"])
def test_a_parameter_at_rest_has_its_shape_reads_nan_and_holds_no_memory(row: str) -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(ROWS[row], torch.bfloat16), backend)
        shapes = {name: parameter.shape for name, parameter in rank.model.named_parameters()}

        def check() -> None:
            for name, parameter in rank.model.named_parameters():
                assert parameter.shape == shapes[name]
                assert bool((parameter * 2).isnan().all())
                assert parameter.untyped_storage().nbytes() == parameter.element_size()

        check()
        rank.accumulate(0)
        check()
        rank.engine.close()

    run_world((2, 2), program)


def test_a_parameter_stays_the_same_object_from_construction_on() -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(POLICIES[3]), backend)
        before = [id(parameter) for parameter in rank.model.parameters()]
        for step in range(2):
            rank.step(step)
        rank.engine.close()
        assert [id(parameter) for parameter in rank.model.parameters()] == before
        assert all(parameter.grad is None for parameter in rank.model.parameters())

    run_world((2, 2), program)


@pytest.mark.parametrize("row", [*ROWS, "stage 3, rotated codes", "secondary row, rotated codes"])
def test_the_padding_of_main_weights_and_gradients_stays_zero(row: str) -> None:
    policy = ROWS[row.removesuffix(", rotated codes")]
    if row.endswith("rotated codes"):
        policy = with_quantized_gradients(policy, LinkBits(4, 4).codes(CodeOptions(is_rotated=True)))

    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(policy, microbatches=2), backend)
        for step in range(2):
            rank.accumulate(step)
            rank.engine.finish_gradients()
            for unit, gradient in zip(rank.engine.units, rank.engine.gradients, strict=True):
                own = torch.ones(unit.main_weight.numel(), dtype=torch.bool)
                for segment in unit.layout.segments(unit.first_slice, unit.slices):
                    own[segment.offset : segment.offset + segment.stop - segment.start] = False
                gradient_there = torch.cat([part.flatten() for part in gradient.for_optimizer.parts()])
                assert not unit.main_weight[own].any() and not gradient_there[own].any()
            rank.engine.step(1e-2)
        rank.engine.close()

    run_world((2, 2), program)
