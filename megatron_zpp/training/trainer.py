"""Training loop: steps, reports, validation, checkpoints."""

from __future__ import annotations

from megatron_zpp.checkpoint.island_state import state_of
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.batch_schedule import running_schedule
from megatron_zpp.config.schema import Config
from megatron_zpp.data.blended_dataset import SourceTally
from megatron_zpp.data.datasets import Datasets
from megatron_zpp.data.loader import MicroBatches, TokenPart
from megatron_zpp.data.sampler import MicroBatchSampler
from megatron_zpp.model.gpt import GPT
from megatron_zpp.monitor.progress_file import ProgressFile
from megatron_zpp.monitor.training_line import validation_lines
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.training.bad_iterations import BadIterations
from megatron_zpp.training.evaluation import HeldOutSet, HeldOutSets, evaluate, is_followed_by_validation
from megatron_zpp.training.garbage import GarbageCollection
from megatron_zpp.training.lr_schedule import LearningRateSchedule
from megatron_zpp.training.metrics import StepReadings, StepTimes, Stopwatch
from megatron_zpp.training.other_islands import OtherIslands
from megatron_zpp.training.reporter import Reporter
from megatron_zpp.training.same_samples import SameSamples
from megatron_zpp.training.saving import RunSaver
from megatron_zpp.training.sharding import sample_groups_of
from megatron_zpp.training.step import StepOutcome, forward_backward, row_of
from megatron_zpp.training.stop_conditions import StopConditions, StopRequest, reason_for_stopping
from megatron_zpp.training.weight_decay import WeightDecaySchedule
from megatron_zpp.training.writers import Writers
from megatron_zpp.zero.engine import ZeroEngine


class Trainer:
    """One rank's training run. Every rank must make the same calls.

    progress: where the run starts; the trainer advances it. outer: the outer steps of islands; None without them.
    """

    def __init__(
        self,
        config: Config,
        model: GPT,
        engine: ZeroEngine,
        datasets: Datasets,
        writers: Writers,
        progress: Progress,
        outer: OuterSteps | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._engine = engine
        self._outer = outer
        self._outer_bytes = 0 if outer is None else outer.state_bytes()  # which do not change
        self._other_islands = OtherIslands(outer)
        self._writers = writers
        self._progress = progress
        self._schedule = LearningRateSchedule.from_config(config.optimizer, config.training, config.sample_lengths)
        self._weight_decays = WeightDecaySchedule.from_config(config.optimizer, config.training, config.sample_lengths)
        self._saver = RunSaver(config, state_of(engine, outer), model.padded_vocab_size, writers)
        self._garbage = GarbageCollection(config.training)
        self._iterations_to_skip = frozenset(int(iteration) for iteration in config.training.iterations_to_skip)
        self._bad_iterations = BadIterations()
        self._reason_for_stopping: str | None = None
        grid, size = engine.links.grid, config.training.micro_batch_size
        first = 0 if outer is None else outer.island * grid.sample_groups
        group, groups = first + grid.sample_group_of(engine.rank), sample_groups_of(config, grid)
        part = TokenPart(grid.context_rank_of(engine.rank), grid.context_ranks)
        sampler = MicroBatchSampler(len(datasets.train), progress.consumed_samples, size, group, groups)
        self._batch_sizes = running_schedule(config, groups)
        self._same_samples = SameSamples(engine)
        self._train_batches = MicroBatches(datasets.train, sampler, config.data.num_workers, datasets.rules, self._same_samples.read, part)
        make_check = self._same_samples.of_another_set
        self._held_out = HeldOutSets(config, datasets, progress.iteration, group=group, groups=groups, part=part, make_check=make_check)
        tally = SourceTally(datasets.train) if config.logging.log_samples_per_source else None
        self._reporter = Reporter(config, model.padded_vocab_size, engine, writers, tally, self._held_out.final_evaluations, outer)

    def run(self) -> None:
        """Trains up to --train-iters or until a stop condition holds, and saves under --save. With --skip-train it only evaluates.

        The text of KeyboardInterrupt says where it was interrupted, and what is saved.
        """
        try:
            with self._garbage:
                if self._config.training.skip_train:
                    self._evaluate_at_the_end()
                else:
                    self._train()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f" after iteration {self._progress.iteration}; {self._saver.what_is_saved()}") from None

    def _train(self) -> None:
        printer, training = self._writers.printer, self._config.training
        first = self._progress.iteration
        printer.milestone("before the start of training step")
        if self._writers.progress_file is not None:
            self._writers.progress_file.attempt(ProgressFile.job_has_started)
        stop_conditions, stopwatch = StopConditions(training, printer.rank), Stopwatch()
        try:
            while self._progress.iteration < training.train_iters and self._reason_for_stopping is None:
                with stopwatch.paused():
                    self._profile()
                if self._progress.iteration + 1 in self._iterations_to_skip:
                    with stopwatch.paused():
                        self._skip_iteration(stop_conditions)
                else:
                    self._step(stop_conditions, stopwatch)
                self._saver.check()
                self._garbage.after_iteration(self._progress.iteration)
                with stopwatch.paused():
                    self._between_steps()
            self._reporter.finish(self._progress)
            self._end_profile()
            if self._reason_for_stopping is not None:
                printer.milestone(self._reason_for_stopping)
            if self._progress.iteration > first:
                self._saver.finish()  # an evaluation that fails would end the process, and with it a checkpoint that is being written
                if self._progress.iteration == training.train_iters:
                    self._evaluate_at_the_end()
            stop_conditions.ignore_signals()  # a signal may still come, as its sender cannot know that this rank has saved
        finally:
            stop_conditions.close()

    def _step(self, stop_conditions: StopConditions, stopwatch: Stopwatch) -> None:
        progress, loss_scaler, waited = self._progress, self._engine.loss_scaler, self._train_batches.wait_seconds
        batch_size = self._batch_sizes.batch_size(progress.consumed_samples)
        learning_rate = self._schedule.learning_rate(progress.scheduled(self._schedule.tokens_per_sample))
        scaler_before = loss_scaler.state()
        outcome, requests = self._train_step(batch_size // self._batch_sizes.grain, learning_rate, stop_conditions)
        times = StepTimes(batch_size, stopwatch.lap(), self._train_batches.wait_seconds - waited)
        self._bad_iterations.count(outcome, progress, scaler_before)
        # An island skips a step by itself, and the learning rate must be the same on all.
        is_skipped = outcome.is_skipped and self._outer is None
        progress.advance(batch_size, self._config.model.seq_length, is_skipped=is_skipped)
        self._note_requests(requests)
        readings = StepReadings(outcome, batch_size, learning_rate, loss_scaler.scale)
        self._reporter.iteration(progress, readings, times, is_last=self._is_last())
        self._bad_iterations.end_run_if_too_many(self._config, self._engine, self._saver)

    def _train_step(self, microbatches: int, learning_rate: float, stop_conditions: StopConditions) -> tuple[StepOutcome, StopRequest]:
        """Trains on the next micro-batches; returns the result of the step and the stop requests of the ranks of this island."""
        engine = self._engine
        weight_decay = self._weight_decays.weight_decay(self._progress.scheduled(self._weight_decays.tokens_per_sample))
        loss_sum = forward_backward(self._model, engine, self._train_batches, microbatches)
        states = engine.state_bytes()
        self._saver.wait_for_copy()  # a checkpoint may still be copying the weights and moments that the update changes
        own = row_of([loss_sum, stop_conditions.request(), *self._same_samples.numbers], engine.device)
        with engine.options.observer.phase("optimizer"):
            update = engine.update(learning_rate, weight_decay, own, lambda of_ranks: self._same_samples.differ(of_ranks[:, 2:]))
        # Tensor ranks of equal data rank have the same loss, so the mean takes that of the first.
        loss_sums, requests = update.report[:: len(own) * engine.links.grid.tensor_ranks], update.report[1 :: len(own)]
        self._same_samples.compare(update.report[2 :: len(own)])
        lm_loss = sum(loss_sums) / (microbatches * len(loss_sums))
        if self._outer is not None:
            self._outer.step()
        on_device = states.device + self._outer_bytes
        outcome = StepOutcome(lm_loss, update.grad_norm, update.is_skipped, on_device, update.num_zeros, states.host)
        return outcome, StopRequest.of_ranks(requests)

    def _skip_iteration(self, stop_conditions: StopConditions) -> None:
        """Consumes the samples of an iteration of --iterations-to-skip, without training on them."""
        progress = self._progress
        first, batch_size = progress.consumed_samples, self._batch_sizes.batch_size(progress.consumed_samples)
        for _ in range(batch_size // self._batch_sizes.grain):
            next(self._train_batches)
        progress.advance(batch_size, self._config.model.seq_length, is_skipped=True)
        self._engine.finish_differences()  # with the random signs of their own step, as before a save
        self._engine.start_iteration(progress.iteration)
        if self._outer is not None:
            self._saver.wait_for_copy()
            self._outer.step()
        own = row_of([stop_conditions.request()], self._engine.device)
        self._note_requests(StopRequest.of_ranks(self._engine.gather_world(own).flatten().tolist()))
        self._writers.printer.on_last(
            f" iteration {progress.iteration:8d} is passed over (--iterations-to-skip): samples {first} to {first + batch_size - 1}"
        )

    def _note_requests(self, requests: StopRequest) -> None:
        """Ends the run after this iteration if there is a reason. requests: of the ranks of this island."""
        iteration = self._progress.iteration
        known = self._other_islands.requests(requests, iteration)
        self._reason_for_stopping = reason_for_stopping(known, iteration, self._config.training)

    def _between_steps(self) -> None:
        """Saves and validates if they are due. Saves first: a run that was asked to end may be killed during a validation."""
        training, iteration, save_interval = self._config.training, self._progress.iteration, self._config.checkpoint.save_interval
        if self._outer is not None and iteration == training.train_iters:
            self._outer.take_means()  # else what islands have learned since their last exchange would be in no outer weight
        if (save_interval is not None and iteration % save_interval == 0) or self._is_last():
            self._save()
        if is_followed_by_validation(iteration, training) and iteration < training.train_iters:
            self._validate()

    def _evaluate_at_the_end(self) -> None:
        self._validate(drawn_from=" on validation set")
        self._test()

    def _save(self) -> None:
        if self._config.checkpoint.save is None:
            return
        with self._engine.options.observer.phase("save-checkpoint"):
            self._saver.save(self._progress)
        self._reporter.between_steps("save-checkpoint")

    def _profile(self) -> None:
        """Starts this rank's profile before its first iteration, and ends it after its last."""
        instruments, iteration = self._writers.instruments, self._progress.iteration
        if instruments.traces is not None:
            instruments.traces.attempt(lambda profiler: self._writers.printer.on_this(profiler.before_step(iteration + 1)))

    def _end_profile(self) -> None:
        instruments, iteration = self._writers.instruments, self._progress.iteration
        if instruments.traces is not None:
            instruments.traces.attempt(lambda profiler: self._writers.printer.on_this(profiler.finish(iteration)))

    def _is_last(self) -> bool:
        return self._progress.iteration == self._config.training.train_iters or self._reason_for_stopping is not None

    def _validate(self, drawn_from: str = "") -> None:
        for held_out in self._held_out.validation:
            self._reporter.validation(self._progress, self._evaluate(held_out, drawn_from), held_out.name)

    def _test(self) -> None:
        if self._held_out.test is not None:
            self._reporter.test(self._progress, self._evaluate(self._held_out.test, " on test set"))

    def _evaluate(self, held_out: HeldOutSet, drawn_from: str) -> float:
        """Evaluates, prints the mean loss and returns it."""
        for links in (self._engine.links, *([self._outer.links] if self._outer is not None else [])):
            links.lanes.drain()  # may fork data workers, which is safe only while no other thread works
        if held_out.batches.starts_workers:
            self._saver.finish()  # a worker would keep open what the save writes, and with it the disk space after --keep-last deletes it
        if self._outer is not None:
            self._saver.wait_for_copy()  # which copies inner weights, and the outer ones take their place
        with self._garbage.evaluation(), self._engine.options.observer.phase("eval-time"):
            loss = evaluate(self._model, self._engine, held_out, self._outer)
        self._reporter.between_steps("eval-time")
        self._writers.printer.on_last(validation_lines(self._progress.iteration, loss, set_name=held_out.name, drawn_from=drawn_from))
        return loss
