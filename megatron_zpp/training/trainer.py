"""The training loop: steps, lines, validation, checkpoints, from wherever the run stands to its end."""

from __future__ import annotations

import time

from megatron_zpp.config.schema import Config
from megatron_zpp.data.blended_dataset import SourceTally
from megatron_zpp.data.datasets import Datasets
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.sample import SampleSource
from megatron_zpp.data.sampler import MicroBatchSampler
from megatron_zpp.model.gpt import GPT
from megatron_zpp.monitor.training_line import validation_lines
from megatron_zpp.training.evaluation import evaluate
from megatron_zpp.training.leaving import Leaving, reason_for_leaving
from megatron_zpp.training.lr_schedule import LearningRateSchedule
from megatron_zpp.training.metrics import BadIterations, Progress, StepReadings, StepTimes
from megatron_zpp.training.reporter import Outlets, Reporter
from megatron_zpp.training.saving import RunSaver
from megatron_zpp.training.step import StepPlan, train_step
from megatron_zpp.zero.engine import ZeroEngine


class Trainer:
    """One rank's training run. Every rank makes the same calls.

    progress: where the run stands; it is moved on.
    """

    def __init__(self, config: Config, model: GPT, engine: ZeroEngine, datasets: Datasets, outlets: Outlets, progress: Progress) -> None:
        self._config = config
        self._model = model
        self._engine = engine
        self._outlets = outlets
        self._progress = progress
        self._schedule = LearningRateSchedule.from_config(config.optimizer, config.training)
        self._saver = RunSaver(config, engine, model.padded_vocab_size, outlets.printer, outlets.progress_file)
        tally = SourceTally(datasets.train) if config.logging.log_samples_per_source else None
        self._reporter = Reporter(config, model.padded_vocab_size, engine, outlets, tally)
        topology = engine.ladder.topology
        self._microbatches = config.training.global_batch_size // (config.training.micro_batch_size * topology.world_size)
        evaluations = progress.iteration // config.training.eval_interval
        consumed_valid_samples = evaluations * config.training.eval_iters * config.training.global_batch_size
        self._bad_iterations = BadIterations()
        self._reason_for_leaving: str | None = None
        self._rules = datasets.rules
        self._train_batches = self._batches(datasets.train, progress.consumed_samples)
        self._valid_batches = self._held_out_batches(datasets.valid, consumed_valid_samples)
        self._test_batches = self._held_out_batches(datasets.test, 0)

    def run(self) -> None:
        """Trains up to --train-iters, or until there is a reason to leave before, and saves what --save asks for."""
        printer, training = self._outlets.printer, self._config.training
        first = self._progress.iteration
        printer.milestone("before the start of training step")
        if self._outlets.progress_file is not None:
            self._outlets.progress_file.job_has_started()
        leaving = Leaving(training)
        try:
            while self._progress.iteration < training.train_iters and self._reason_for_leaving is None:
                self._profile()
                self._step(leaving)
                self._saver.check()
                self._between_steps()
            self._end_profile()
            if self._reason_for_leaving is not None:
                printer.milestone(self._reason_for_leaving)
            if self._progress.iteration > first:
                self._finish()
        finally:
            leaving.close()  # not before all is saved: a signal to this rank may come after that of another has ended the loop

    def _step(self, leaving: Leaving) -> None:
        started, waited = time.perf_counter(), self._train_batches.wait_seconds
        plan = StepPlan(self._microbatches, self._schedule.learning_rate(self._progress.scheduled_samples), leaving.wish)
        scaler_before = self._engine.loss_scaler.state()
        outcome = train_step(self._model, self._engine, self._train_batches, plan)
        seconds = time.perf_counter() - started
        self._bad_iterations.count(outcome, self._progress, scaler_before)
        self._progress.advance(self._config.training.global_batch_size, is_skipped=outcome.is_skipped)
        times = StepTimes(seconds, self._train_batches.wait_seconds - waited)
        self._reason_for_leaving = reason_for_leaving(outcome.wishes, self._progress.iteration, self._config.training)
        readings = StepReadings(outcome, plan.learning_rate, self._engine.loss_scaler.scale)
        self._reporter.iteration(self._progress, readings, times, is_last=self._is_last())
        self._end_if_all_is_bad()

    def _between_steps(self) -> None:
        """Saves first: whoever asks the run to leave may not wait for a validation."""
        if self._is_multiple_of(self._config.checkpoint.save_interval) or self._is_last():
            self._save()
        if self._is_multiple_of(self._config.training.eval_interval) and self._progress.iteration < self._config.training.train_iters:
            self._validate()

    def _finish(self) -> None:
        if self._progress.iteration == self._config.training.train_iters:
            self._validate(drawn_from=" on validation set")
            self._test()
        self._saver.finish()

    def _save(self) -> None:
        if self._config.checkpoint.save is None:
            return
        with self._engine.observer.phase("save-checkpoint"):
            self._saver.save(self._progress)
        self._reporter.between_steps("save-checkpoint")

    def _profile(self) -> None:
        """Begins or ends a profile that this rank is to make, before the next iteration."""
        profiler = self._outlets.instruments.profiler
        if profiler is not None:
            self._outlets.printer.on_this(profiler.before_step(self._progress.iteration + 1))

    def _end_profile(self) -> None:
        profiler = self._outlets.instruments.profiler
        if profiler is not None:
            self._outlets.printer.on_this(profiler.finish(self._progress.iteration))

    def _is_multiple_of(self, interval: int | None) -> bool:
        return interval is not None and self._progress.iteration % interval == 0

    def _held_out_batches(self, source: SampleSource | None, consumed_samples: int) -> MicroBatches | None:
        """None where the corpus leaves the split empty, or --eval-iters is 0."""
        if source is None or self._config.training.eval_iters == 0:
            return None
        return self._batches(source, consumed_samples)

    def _batches(self, source: SampleSource, consumed_samples: int) -> MicroBatches:
        backend = self._engine.ladder.backend
        sampler = MicroBatchSampler(
            total_samples=len(source),
            consumed_samples=consumed_samples,
            micro_batch_size=self._config.training.micro_batch_size,
            data_parallel_rank=backend.rank,
            data_parallel_size=backend.topology.world_size,
        )
        return MicroBatches(source, sampler, self._config.data.num_workers, self._rules)

    def _is_last(self) -> bool:
        training = self._config.training
        return self._progress.iteration == training.train_iters or self._reason_for_leaving is not None

    def _validate(self, drawn_from: str = "") -> None:
        loss = self._evaluate(self._valid_batches, drawn_from)
        if loss is not None:
            self._reporter.validation(self._progress, loss)

    def _test(self) -> None:
        loss = self._evaluate(self._test_batches, " on test set")
        if loss is not None:
            self._reporter.test(self._progress, loss)

    def _evaluate(self, batches: MicroBatches | None, drawn_from: str) -> float | None:
        """The mean loss, printed; None where there is nothing to evaluate on."""
        if batches is None:
            return None
        with self._engine.observer.phase("eval-time"):
            loss = evaluate(self._model, self._engine, batches, self._config.training.eval_iters * self._microbatches)
        self._reporter.between_steps("eval-time")
        self._outlets.printer.on_last(validation_lines(self._progress.iteration, loss, drawn_from=drawn_from))
        return loss

    def _end_if_all_is_bad(self) -> None:
        """Raises RuntimeError after --max-consecutive-bad-iterations, with a checkpoint from before the first of them behind it."""
        limit = self._config.training.max_consecutive_bad_iterations
        if limit == 0 or self._bad_iterations.consecutive < limit:
            return
        raise RuntimeError(
            f"{limit} iterations in a row (--max-consecutive-bad-iterations) had a NaN or infinite loss or gradient, from iteration "
            f"{self._bad_iterations.progress_before.iteration + 1} on; {self._save_from_before()}. Look at their data, or lower --lr."
        )

    def _save_from_before(self) -> str:
        """Saves the state that the run had before the bad iterations; says what was saved, or why nothing was."""
        bad = self._bad_iterations
        before = bad.progress_before
        if before.iteration == 0:
            return "there is nothing before it to save"
        if not bad.weights_are_from_before:
            return "nothing is saved, because one of them has changed the weights: go on from an earlier checkpoint"
        if self._config.checkpoint.save is None:
            return "nothing is saved without --save"
        self._engine.loss_scaler.load_state(bad.scaler_before)
        self._saver.save(before)
        self._saver.finish()
        return f"{self._config.checkpoint.save} holds the state from before, of iteration {before.iteration}"
