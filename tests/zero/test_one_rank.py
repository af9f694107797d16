"""A world of one rank: nothing descends or climbs over a link, and no buffer is taken for it."""

from __future__ import annotations

import pytest
import torch
from harness.small_engine import ROWS, Job, ModelShape, Rank, train_world
from harness.worlds import run_world
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.policy import ZEROPP, Rung

pytestmark = pytest.mark.virtual
EVERY_ROW = {**ROWS, "ZeRO++": ZEROPP}


@pytest.mark.parametrize("row", list(EVERY_ROW))
def test_one_rank_submits_no_hop_and_takes_no_buffer(row: str) -> None:
    def program(backend: VirtualBackend) -> tuple[int, int]:
        rank = Rank(Job(EVERY_ROW[row], torch.bfloat16, ModelShape(is_recomputed=True), microbatches=2), backend)
        rank.train()
        return len(rank.lanes.submissions), rank.engine.links.staging.allocated_bytes

    assert run_world((1, 1), program) == [(0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_row_trains_one_rank_with_the_same_bits_whatever_the_number_of_micro_batches(dtype: torch.dtype) -> None:
    for microbatches in (1, 3):
        shape = ModelShape(has_spare=True)  # a parameter that gets no gradient
        histories = [train_world((1, 1), Job(policy, dtype, shape, microbatches=microbatches)) for policy in EVERY_ROW.values()]
        assert all(history == histories[0] for history in histories)


class Copies(TorchDispatchMode):
    """Counts the values that copies write, by the dtype that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.numel: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func._schema.name in ("aten::copy_", "aten::_foreach_copy_"):
            for target in [args[0]] if isinstance(args[0], Tensor) else args[0]:
                self.numel[target.dtype] = self.numel.get(target.dtype, 0) + target.numel()
        return func(*args, **(kwargs or {}))


def test_a_climb_of_one_rank_casts_its_main_weights_once_and_copies_nothing_else() -> None:
    def program(backend: VirtualBackend) -> bool:
        rank = Rank(Job(ROWS["stage 3"], torch.bfloat16), backend)
        for unit in rank.engine.units:
            with Copies() as copies:
                unit.climb(Rung.FULL)
            assert copies.numel == {torch.bfloat16: unit.layout.numel}
        rank.engine.close()
        return True

    assert run_world((1, 1), program) == [True]
