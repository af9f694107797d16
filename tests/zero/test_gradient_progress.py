"""Calls of an engine in their turn and out of it."""

from __future__ import annotations

import pytest

from megatron_zpp.zero.gradient_progress import GradientProgress


def after(*microbatches: bool) -> GradientProgress:
    """microbatches: of each whether it is the last of its step."""
    progress = GradientProgress()
    for is_last in microbatches:
        progress.begin_backward()
        progress.end_backward(is_last_microbatch=is_last)
    return progress


def test_the_mean_of_a_step_is_missing_once_and_after_its_last_micro_batch_alone() -> None:
    progress = after(False, True)
    assert progress.is_mean_missing()
    progress.end_mean()
    assert not progress.is_mean_missing()
    progress.begin_update()
    progress.end_update()
    assert not progress.is_mean_missing()
    progress.begin_backward()


def test_a_step_without_gradients_may_be_updated() -> None:
    progress = after()
    assert not progress.is_mean_missing()
    progress.begin_update()


@pytest.mark.parametrize("has_mean", [False, True])
def test_no_micro_batch_follows_the_last_one_of_a_step(has_mean: bool) -> None:
    progress = after(True)
    if has_mean:
        progress.end_mean()
    with pytest.raises(RuntimeError, match=r"call engine\.step\(\), and pass is_last_microbatch=False"):
        progress.begin_backward()


@pytest.mark.parametrize("microbatches", [(False,), (True,), (False, True)])
def test_an_update_needs_the_mean(microbatches: tuple[bool, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"call engine\.finish_gradients\(\) before engine\.update\(\)"):
        after(*microbatches).begin_update()


def test_a_mean_needs_the_last_micro_batch() -> None:
    with pytest.raises(RuntimeError, match="pass is_last_microbatch=True with the last one"):
        after(False).is_mean_missing()


def test_an_update_uses_its_gradients_up() -> None:
    progress = after(True)
    progress.end_mean()
    progress.begin_update()
    progress.end_update()
    with pytest.raises(RuntimeError, match=r"has used the gradients.*call engine\.backward\(\)"):
        progress.begin_update()


def test_nothing_follows_a_backward_that_did_not_end() -> None:
    progress = after(False)
    progress.begin_backward()
    for call in (progress.begin_backward, progress.is_mean_missing, progress.begin_update, progress.check_usable):
        with pytest.raises(RuntimeError, match=r"an earlier engine\.backward\(\) failed"):
            call()
