import math
from typing import Any

import pytest

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.flops import hardware_flops, model_flops
from megatron_zpp.monitor.memory import MemoryReading
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.metrics import Interval, ReportInputs, StepReadings, StepTimes, StepTraffic, interval_report
from megatron_zpp.training.step import StepOutcome

pytestmark = pytest.mark.pure

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --mock-data --vocab-size 8 --train-iters 9"
)


CONFIG = resolve(parse_flags(FLAGS.split()), 2, 1)


def reported() -> dict[str, Any]:
    """The record of three steps, of 4 samples each, that take 6 seconds on 2 ranks."""
    interval, outcome = Interval(), StepOutcome(2.0, 1.0, False, 0)
    for nbytes, seconds in ((100, 1.0), (200, 2.0), (600, 3.0)):
        interval.add(outcome, StepTimes(4, seconds, 0.0), nbytes)
    inputs = ReportInputs(StepReadings(outcome, 4, 0.1, 1.0), 8, MemoryReading(0, 0))
    traffic = StepTraffic(Ledger(Grid.of_nodes(2, 1), 0))
    return interval_report(CONFIG, Progress(), interval, inputs, traffic).json_object()


def test_a_report_has_the_mean_bytes_and_times_of_all_steps_of_its_interval_and_how_many_they_are() -> None:
    logged = reported()
    assert (logged["interval_iterations"], logged["train_iters"]) == (3, 9)
    assert (logged["inter_node_bytes_per_iteration"], logged["elapsed_ms_per_iteration"]) == (300.0, 2000.0)
    assert not any(isinstance(value, float) and math.isnan(value) for value in logged.values())


def test_teraflops_are_the_operations_of_the_interval_by_its_seconds_and_ranks() -> None:
    logged, made = reported(), hardware_flops(CONFIG.model, 8, 12, micro_batch_size=1)
    assert logged["tflops_per_gpu"] == pytest.approx(made / 6.0 / 2 / 1e12)
    assert logged["model_tflops_per_gpu"] == pytest.approx(model_flops(CONFIG.model, 8, 12) / 6.0 / 2 / 1e12)
