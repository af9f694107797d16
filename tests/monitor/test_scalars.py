"""Points under Megatron-LM's tags."""

from dataclasses import replace

from harness.sample_report import REPORT

from megatron_zpp.monitor.memory import MemoryReading
from megatron_zpp.monitor.scalars import ScalarChoice, interval_scalars, iteration_scalars, timer_scalars, validation_scalars

ALL = ScalarChoice(world_size=True, memory=True, validation_ppl=True)
ON_GPU = replace(REPORT, num_zeros=7, params_norm=2.5, memory=MemoryReading(10, 20, 30, 40, 50))


def test_tags_drawn_against_samples_too_are_megatrons():
    assert interval_scalars(ON_GPU, ALL) == {
        "learning-rate": 3e-4,
        "batch-size": 64,
        "lm loss": 14.90005,
        "loss-scale": 2048.0,
        "world-size": 64,
        "grad-norm": 1.2345,
        "num-zeros": 7,
        "params-norm": 2.5,
    }


def test_tags_drawn_against_iterations_alone_are_megatrons_in_seconds_and_model_flops():
    assert iteration_scalars(ON_GPU, ALL) == {
        "iteration-time": 7.1227,
        "throughput": 8.0,
        "mem-reserved-bytes": 30,
        "mem-allocated-bytes": 10,
        "mem-max-allocated-bytes": 20,
        "mem-allocated-count": 50,
    }


def test_what_is_not_wanted_or_not_known_is_left_out():
    least = ScalarChoice(learning_rate=False, loss_scale=False)
    assert list(interval_scalars(REPORT, least)) == ["batch-size", "lm loss", "grad-norm"]
    assert list(iteration_scalars(REPORT, least)) == ["iteration-time", "throughput"]
    assert list(iteration_scalars(REPORT, ALL)) == ["iteration-time", "throughput", "mem-allocated-bytes", "mem-max-allocated-bytes"]


def test_a_validation_has_its_loss_and_where_wanted_its_perplexity():
    assert validation_scalars(0.0, ALL) == {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}
    assert validation_scalars(0.0, ScalarChoice(), set_name="books") == {"lm loss validation-books": 0.0}


def test_a_timer_is_drawn_by_its_slowest_rank_in_seconds():
    assert timer_scalars({"optimizer": [1.0, 4.0, 2.0]}) == {"optimizer-time": 0.004}
