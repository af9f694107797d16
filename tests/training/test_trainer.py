"""Order of the calls in an iteration. Whole runs in tests/integration prove the results."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE_SECONDS
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY, entry

from megatron_zpp.zero.optimizer_step import StepResult


def without_plan(patch: pytest.MonkeyPatch) -> None:
    """Leaves out the plan before a run: it is made of steps of the engine, too."""
    from megatron_zpp.training import startup_checks

    patch.setattr(startup_checks, "check_memory", lambda *arguments: None)


def order_of_events(flags: list[str]) -> list[str]:
    """Names of the calls that the entry makes, in order. Of a gather over the world also its number of values."""
    from megatron_zpp.checkpoint.saver import CheckpointSaver
    from megatron_zpp.comm.links import Links
    from megatron_zpp.training.stop_conditions import StopConditions
    from megatron_zpp.zero.engine import ZeroEngine

    events: list[str] = []

    def noting(owner: type, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def noted(self: object, *arguments: Any, **keywords: Any) -> Any:
            events.append(f"{name} of {arguments[0].numel()}" if owner is Links else name)
            return original(self, *arguments, **keywords)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (ZeroEngine, "finish_gradients"),
            (ZeroEngine, "state_bytes"),
            (ZeroEngine, "update"),
            (CheckpointSaver, "wait_for_copy"),
            (StopConditions, "request"),
            (Links, "gather_world"),
        ):
            patch.setattr(owner, name, noting(owner, name))
        without_plan(patch)
        assert entry(flags) == 0
    return events


def test_a_step_waits_for_the_copy_before_its_update_and_gathers_what_ranks_tell_at_once(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"--zero-stage 3 --train-iters 2 --global-batch-size 8 --iterations-to-skip 2 --save {tmp_path}"
    (events,) = ranks.run(1, 1, order_of_events, [*TINY, *flags.split()])
    # The sum of squares, the order of hops, whether parameters were left out, the loss and the request.
    step = ["finish_gradients", "state_bytes", "wait_for_copy", "request", "update", "gather_world of 5"]
    skipped = ["request", "gather_world of 1"]
    assert events[: len(step) + len(skipped)] == [*step, *skipped]


def seconds_of_iterations(flags: list[str]) -> list[float]:
    """What the reporter is told, if an update takes 1 s, a report 10, and a save, a validation, a profile and a skipped iteration 100."""
    from types import SimpleNamespace

    from megatron_zpp.training import metrics
    from megatron_zpp.training.reporter import Reporter
    from megatron_zpp.training.saving import RunSaver
    from megatron_zpp.training.trainer import Trainer
    from megatron_zpp.zero.engine import ZeroEngine

    now, told = 0.0, list[float]()

    def taking(seconds: float, owner: type, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def timed(self: object, *arguments: Any, **keywords: Any) -> Any:
            nonlocal now
            now += seconds
            if owner is Reporter:
                told.append(arguments[2].seconds)
            return original(self, *arguments, **keywords)

        return timed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now))
        for seconds, owner, name in (
            (1.0, ZeroEngine, "update"),
            (10.0, Reporter, "iteration"),
            (100.0, RunSaver, "save"),
            (100.0, Trainer, "_validate"),
            (100.0, Trainer, "_profile"),
            (100.0, Trainer, "_skip_iteration"),
        ):
            patch.setattr(owner, name, taking(seconds, owner, name))
        assert entry(flags) == 0
    return told


def test_an_iteration_is_timed_from_the_end_of_the_one_before_without_what_else_a_run_does(ranks: RankPool, tmp_path: Path) -> None:
    """A report belongs to the next iteration, because it may wait for the device, as timers do. Iteration 3 is skipped."""
    flags = f"--zero-stage 3 --train-iters 5 --eval-interval 2 --eval-iters 1 --save {tmp_path} --save-interval 2 --iterations-to-skip 3"
    assert ranks.run(1, 1, seconds_of_iterations, [*TINY, *flags.split()]) == [[1.0, 11.0, 11.0, 11.0]]


def checkpoints_at_the_last_evaluation(flags: list[str]) -> list[list[int]]:
    """The iterations that are saved when the evaluation at the end begins. Nothing is written before the run waits for it, or evaluates."""
    from megatron_zpp.checkpoint import saver
    from megatron_zpp.checkpoint.folders import complete_iterations
    from megatron_zpp.training.saving import RunSaver
    from megatron_zpp.training.trainer import Trainer

    write, finish, evaluate = saver.write_pieces, RunSaver.finish, Trainer._evaluate_at_the_end
    may_write, found = threading.Event(), list[list[int]]()

    def held_write(*arguments: Any) -> Any:
        may_write.wait(PATIENCE_SECONDS)
        return write(*arguments)

    def noted_finish(run: RunSaver) -> None:
        if run._saver is not None and run._saver.iteration_under_way is not None:
            may_write.set()
        finish(run)

    def noted_evaluation(trainer: Trainer) -> None:
        found.append(complete_iterations(Path(flags[flags.index("--save") + 1])))
        may_write.set()
        evaluate(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_pieces", held_write)
        patch.setattr(RunSaver, "finish", noted_finish)
        patch.setattr(Trainer, "_evaluate_at_the_end", noted_evaluation)
        assert entry(flags) == 0
    return found


def test_the_last_checkpoint_is_complete_before_the_evaluation_at_the_end_which_may_fail(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"--train-iters 2 --global-batch-size 8 --eval-iters 1 --async-save --save {tmp_path}"
    assert ranks.run(1, 1, checkpoints_at_the_last_evaluation, [*TINY, *flags.split()]) == [[[2]]]


def saves_under_way_at_evaluations(flags: list[str]) -> list[int | None]:
    """The iteration whose save is under way when an evaluation begins, for each. Nothing is written before the run waits or evaluates.

    This process reads the data, even if the flags ask for workers.
    """
    from megatron_zpp.checkpoint import saver
    from megatron_zpp.data import loader
    from megatron_zpp.training import trainer
    from megatron_zpp.training.saving import RunSaver

    write, finish, evaluate = saver.write_pieces, RunSaver.finish, trainer.Trainer._evaluate
    may_write, savers, found = threading.Event(), list[saver.CheckpointSaver](), list[int | None]()

    def held_write(*arguments: Any) -> Any:
        may_write.wait(PATIENCE_SECONDS)
        return write(*arguments)

    def noted_finish(run: RunSaver) -> None:
        may_write.set()
        finish(run)

    def held_evaluation(run: trainer.Trainer, *arguments: Any) -> float:
        assert run._saver._saver is not None
        savers.append(run._saver._saver)
        return evaluate(run, *arguments)

    def noted_evaluation(*arguments: Any) -> float:
        found.append(savers[-1].iteration_under_way)
        may_write.set()
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_pieces", held_write)
        patch.setattr(RunSaver, "finish", noted_finish)
        patch.setattr(trainer.Trainer, "_evaluate", held_evaluation)
        patch.setattr(trainer, "evaluate", noted_evaluation)
        patch.setattr(loader, "_in_order", lambda batches, sampler, num_workers: (batches[indices] for indices in sampler))
        assert entry(flags) == 0
    return found


@pytest.mark.parametrize(("workers", "under_way"), [(0, 1), (1, None)])
def test_no_checkpoint_is_being_written_when_an_evaluation_starts_workers(
    ranks: RankPool, tmp_path: Path, workers: int, under_way: int | None
) -> None:
    flags = f"--train-iters 2 --global-batch-size 8 --eval-iters 1 --eval-interval 1 --save-interval 1 --async-save --save {tmp_path}"
    (found,) = ranks.run(1, 1, saves_under_way_at_evaluations, [*TINY, *flags.split(), "--num-workers", str(workers)])
    assert found[0] == under_way


def events_and_text(flags: list[str]) -> tuple[list[str], list[bool], str]:
    """The order of events on this rank, whether it and another compared what they have read in each step, and what it printed."""
    from megatron_zpp.training.same_samples import SameSamples

    compare, compared = SameSamples.compare, list[bool]()

    def noted(check: SameSamples, checksums: Sequence[float]) -> None:
        compared.append([*checksums] == 2 * check.numbers)
        compare(check, checksums)

    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SameSamples, "compare", noted)
        events = order_of_events(flags)
    return events, compared, output.getvalue()


def test_ranks_that_share_layers_compare_their_first_micro_batches_before_anything_is_computed_and_all_with_each_loss(
    ranks: RankPool,
) -> None:
    flags = "--zero-stage 3 --train-iters 2 --global-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --eval-iters 1"
    (events, compared, text), (others, _, _) = ranks.run(1, 2, events_and_text, [*TINY, *flags.split()])
    assert events == others and compared == [True] * 4
    assert events[0] == "gather_world of 2"  # checksum and first sample
    assert events.count("gather_world of 2") == 3  # of the sets of validation and test, too
    assert events.count("gather_world of 6") == 2  # in each step: those of any step, and checksums
    assert events.count("gather_world of 3") == 2  # in each evaluation: two numbers, and checksums
    assert "using world size: 2, data-parallel size: 1, tensor-model-parallel size: 2 (1 node x 2 ranks), device: cpu" in text


def events_after_damage(flags: list[str]) -> list[object]:
    """For each update whether it left the weights as they were, and the text of each error about samples, in order.

    Rank 1 reads another sample 2. The run goes on after the error, because a rank that ends by one ends its process.
    """
    from megatron_zpp.data.gpt_dataset import MockDataset, Sample
    from megatron_zpp.training.same_samples import SameSamples
    from megatron_zpp.zero.engine import ZeroEngine

    events: list[object] = []
    read, update, compare = MockDataset.__getitem__, ZeroEngine.update, SameSamples.compare

    def damaged(self: MockDataset, index: int) -> Sample:
        sample = read(self, index)
        return {**sample, "tokens": sample["tokens"] ^ 1} if (index, os.environ["RANK"]) == (2, "1") else sample

    def noting(self: ZeroEngine, *arguments: Any, **keywords: Any) -> StepResult:
        before = [unit.main_weight.clone() for unit in self.units]
        result = update(self, *arguments, **keywords)
        events.append(all(torch.equal(unit.main_weight, values) for unit, values in zip(self.units, before, strict=True)))
        return result

    def noting_error(self: SameSamples, checksums: Sequence[float]) -> None:
        try:
            compare(self, checksums)
        except RuntimeError as error:
            events.append(str(error))

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, call in (
            (MockDataset, "__getitem__", damaged),
            (ZeroEngine, "update", noting),
            (SameSamples, "compare", noting_error),
        ):
            patch.setattr(owner, name, call)
        without_plan(patch)
        assert entry(flags) == 0
    return events


def test_an_update_after_a_later_micro_batch_that_differs_leaves_the_weights_as_they_were(ranks: RankPool) -> None:
    flags = "--zero-stage 3 --train-iters 2 --global-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    for first, second, error in ranks.run(1, 2, events_after_damage, [*TINY, *flags.split()]):
        assert (first, second) == (False, True)
        assert "ranks 0 and 1 share layers (--tensor-model-parallel-size 2), but their micro-batches differ: checksum" in error
