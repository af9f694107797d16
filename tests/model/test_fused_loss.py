"""Head and loss on the CUDA kernels of the loss, with their grids emulated on the CPU."""

from __future__ import annotations

import pytest
from harness.forked import Forked
from harness.kernel_programs import compared
from harness.places import HARNESS

from testbed.kernels.emulation import emulated_kernels

pytestmark = pytest.mark.compiles


def test_on_kernels_loss_and_gradients_are_those_of_torch_within_rounding_and_the_planned_peak_has_no_fp32_copies() -> None:
    assert compared("fused_loss.py", emulated_kernels()) == 4


@pytest.mark.parametrize("label", [50, -1, 2**32])
def test_on_kernels_a_label_outside_of_the_vocabulary_ends_the_run_and_says_why(label: int) -> None:
    finished = Forked(HARNESS / "fused_loss.py", emulated_kernels(), label).finished()
    assert finished.returncode != 0 and "a label is outside of the vocabulary" in finished.stderr
