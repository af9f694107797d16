"""Reports of iterations and validations to the writers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import torch

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.schema import Config, LoggingConfig
from megatron_zpp.data.blended_dataset import SourceTally
from megatron_zpp.monitor.interval_report import IntervalReport
from megatron_zpp.monitor.memory import memory_line, read_memory
from megatron_zpp.monitor.scalars import (
    ScalarChoice,
    interval_scalars,
    iteration_scalars,
    timer_scalars,
    validation_loss,
    validation_scalars,
)
from megatron_zpp.monitor.timers import BETWEEN_STEPS, NEVER_RAN, TIMER_NAMES, timer_lines
from megatron_zpp.monitor.training_line import megatron_lm_line, samples_line, training_line
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.training.hardware import peak_teraflops
from megatron_zpp.training.metrics import Interval, ReportInputs, StepReadings, StepTimes, StepTraffic, interval_report
from megatron_zpp.training.other_islands import of_all_islands
from megatron_zpp.training.writers import Writers
from megatron_zpp.zero.engine import ZeroEngine

STEP_TIMERS = tuple(name for name in TIMER_NAMES if name not in BETWEEN_STEPS)


class Reporter:
    """Reports iterations and validations of one run. Every rank must make the same calls: norms and timers are gathered from all ranks.

    tally: counts the samples of each corpus; None without --log-samples-per-source.
    final_evaluations: the number of evaluations after the last iteration. outer: the outer steps of islands.
    """

    def __init__(
        self,
        config: Config,
        padded_vocab_size: int,
        engine: ZeroEngine,
        writers: Writers,
        tally: SourceTally | None,
        final_evaluations: int,
        outer: OuterSteps | None = None,
    ) -> None:
        self._config = config
        self._padded_vocab_size = padded_vocab_size
        self._engine = engine
        self._everyone = engine if outer is None else outer.everyone
        self._outer = outer
        self._writers = writers
        self._timers = writers.instruments.timers
        self._tally = tally
        self._final_evaluations = final_evaluations
        self._traffic = StepTraffic(engine.links.ledger)
        self._choice = _choice(config.logging)
        self._peak_tflops = config.logging.device_peak_tflops or _known_peak(config, engine.device)
        self._since_line, self._since_point = Interval(), Interval()
        # True on every rank, with or without writers of points: norms of a point are gathered from all ranks.
        self._has_points = config.logging.tensorboard_dir is not None or config.logging.wandb_project is not None
        self._has_printed_memory = False
        self._latest: StepReadings | None = None

    def iteration(self, progress: Progress, readings: StepReadings, times: StepTimes, *, is_last: bool) -> None:
        """Writes a training line every --log-interval iterations and at the end, and points every --tensorboard-log-interval."""
        logging = self._config.logging
        self._latest = readings
        self._traffic.close_step()
        self._timers.settle()
        inter_node_bytes = self._traffic.inter_node_bytes + self._traffic.context_inter_node_bytes
        self._since_line.add(readings.outcome, times, inter_node_bytes)
        line_is_due = progress.iteration % logging.log_interval == 0 or is_last
        point_is_due = False
        if self._has_points:
            self._since_point.add(readings.outcome, times, inter_node_bytes)
            point_is_due = progress.iteration % logging.tensorboard_log_interval == 0
        if line_is_due or point_is_due:
            self._report(progress, self._inputs(readings), line=line_is_due, point=point_is_due)
        self._print_memory(progress.iteration, is_after_line=line_is_due)

    def finish(self, progress: Progress) -> None:
        """Writes the last line if the last iterations were skipped by --iterations-to-skip."""
        if self._latest is not None and self._since_line.iterations > 0:
            self._report(progress, self._inputs(self._latest), line=True, point=self._since_point.iterations > 0)

    def validation(self, progress: Progress, lm_loss: float, set_name: str = "") -> None:
        """Writes the loss on a validation set. set_name: empty if there is only one set."""
        named = {"validation_set": set_name} if set_name else {}
        self._write_record({"iteration": progress.iteration, **named, "validation_loss": lm_loss})
        scalars = validation_scalars(lm_loss, self._choice, set_name=set_name)
        self._write_scalars(scalars, progress.iteration, progress.consumed_samples)
        self._write_scalars(validation_loss(lm_loss, set_name=set_name), progress.iteration)

    def test(self, progress: Progress, lm_loss: float) -> None:
        """Writes the loss on the test set."""
        self._write_record({"iteration": progress.iteration, "test_loss": lm_loss})

    def between_steps(self, name: str) -> None:
        """Prints a timer of BETWEEN_STEPS, after what it measures."""
        if self._config.logging.timing_log_level > 0:
            self._writers.printer.on_last(timer_lines(self._config.logging.timing_log_option, self._gathered_ms((name,), 1)))

    def _inputs(self, readings: StepReadings) -> ReportInputs:
        norm = self._engine.weight_norm() if self._config.logging.log_params_norm else None
        return ReportInputs(readings, self._padded_vocab_size, read_memory(self._engine.device), self._peak_tflops, norm)

    def _report(self, progress: Progress, inputs: ReportInputs, *, line: bool, point: bool) -> None:
        if point:
            self._write_points(self._interval_report(progress, self._since_point, inputs))
            self._since_point = Interval()
        if line:
            self._write_line(self._interval_report(progress, self._since_line, inputs), self._since_line.iterations)
            self._since_line = Interval()

    def _interval_report(self, progress: Progress, interval: Interval, inputs: ReportInputs) -> IntervalReport:
        return interval_report(self._config, progress, *of_all_islands(interval, inputs, self._outer), self._traffic)

    def _write_line(self, report: IntervalReport, iterations: int) -> None:
        logging, printer = self._config.logging, self._writers.printer
        if logging.log_line_format == "megatron-lm":
            printer.on_last(megatron_lm_line(report, datetime.now(), with_throughput=logging.log_throughput))
        else:
            printer.on_last(training_line(report, with_throughput=logging.log_throughput))
        record: dict[str, object] = {**report.json_object(), "final_evaluations": self._final_evaluations}
        record.update(self._samples_per_source(report.consumed_samples))
        if logging.timing_log_level > 0:
            record["timers_ms"] = self._write_timers(report.iteration, iterations)
        self._write_record(record)

    def _print_memory(self, iteration: int, *, is_after_line: bool) -> None:
        """Prints memory after the first training line, and every --log-memory-interval iterations."""
        interval, printer = self._config.logging.log_memory_interval, self._writers.printer
        if (is_after_line and not self._has_printed_memory) or (interval is not None and iteration % interval == 0):
            printer.on_first(memory_line(printer.rank, iteration, read_memory(self._engine.device)))
            self._has_printed_memory = True

    def _write_timers(self, iteration: int, iterations: int) -> dict[str, tuple[float, float]]:
        """Prints the timers and writes their points. Returns minimum and maximum over all ranks, in milliseconds per iteration."""
        logging = self._config.logging
        of_ranks = self._gathered_ms(STEP_TIMERS, iterations)
        self._writers.printer.on_last(timer_lines(logging.timing_log_option, of_ranks))
        if logging.log_timers_to_tensorboard:
            self._write_scalars(timer_scalars(of_ranks), iteration)
        return {name: (min(times), max(times)) for name, times in of_ranks.items()}

    def _gathered_ms(self, names: Sequence[str], iterations: int) -> dict[str, list[float]]:
        """Milliseconds per iteration on each rank, for every timer that ran on any rank."""
        own = torch.tensor(self._timers.take(names), dtype=torch.float64, device=self._engine.device)
        rows = self._everyone.gather_world(own).flatten(0, 1).T.tolist()  # [timers, world_size] seconds
        return {
            name: [max(0.0, seconds) * 1000.0 / iterations for seconds in row]
            for name, row in zip(names, rows, strict=True)
            if max(row) > NEVER_RAN
        }

    def _write_points(self, report: IntervalReport) -> None:
        self._write_scalars(interval_scalars(report, self._choice), report.iteration, report.consumed_samples)
        self._write_scalars(iteration_scalars(report, self._choice), report.iteration)

    def _write_scalars(self, scalars: dict[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        for output in self._writers.scalars:
            output.attempt(lambda writer: writer.write(scalars, iteration, consumed_samples))

    def _write_record(self, record: dict[str, object]) -> None:
        if self._writers.json_lines is not None:
            self._writers.json_lines.attempt(lambda writer: writer.write(record))

    def _samples_per_source(self, consumed_samples: int) -> dict[str, dict[str, int]]:
        """Prints the samples consumed from each corpus. Returns them as fields of a record; empty without --log-samples-per-source."""
        if self._tally is None:
            return {}
        counts = self._tally.up_to(consumed_samples)
        self._writers.printer.on_last(samples_line(counts))
        return {"consumed_samples_per_source": counts}


def _choice(logging: LoggingConfig) -> ScalarChoice:
    return ScalarChoice(
        learning_rate=not logging.no_log_learnig_rate_to_tensorboard,
        loss_scale=not logging.no_log_loss_scale_to_tensorboard,
        world_size=logging.log_world_size_to_tensorboard,
        memory=logging.log_memory_to_tensorboard,
        validation_ppl=logging.log_validation_ppl_to_tensorboard,
    )


def _known_peak(config: Config, device: torch.device) -> float | None:
    """Peak of the GPU in 16-bit arithmetic. None if it is unknown, or the run does not compute in 16 bits."""
    if device.type != "cuda" or not (config.precision.bf16 or config.precision.fp16):
        return None
    return peak_teraflops(torch.cuda.get_device_name(device))
