"""Points under Megatron-LM's tags, and in the two groups that TensorBoard shows opened."""

from dataclasses import replace

from harness.sample_report import REPORT

from megatron_zpp.monitor.memory import MemoryReading
from megatron_zpp.monitor.scalars import (
    ScalarChoice,
    interval_scalars,
    iteration_scalars,
    timer_scalars,
    validation_loss,
    validation_scalars,
)

ALL = ScalarChoice(world_size=True, memory=True, validation_ppl=True)
ON_GPU = replace(
    REPORT, num_zeros=7, params_norm=2.5, context_link_bytes=66, context_inter_node_bytes=77, memory=MemoryReading(10, 20, 30, 40, 50)
)
OURS = {
    "Loss/training": 14.90005,
    "Traffic/inter_node_bytes": 11,
    "Traffic/inter_node_bytes_per_iteration": 11.5,
    "Traffic/intra_node_bytes": 22,
    "Traffic/tensor_link_bytes": 55,
    "Traffic/context_link_bytes": 66,
    "Traffic/context_inter_node_bytes": 77,
}


def without_ours(scalars: dict[str, float]) -> dict[str, float]:
    return {tag: value for tag, value in scalars.items() if tag not in OURS}


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
    assert without_ours(iteration_scalars(ON_GPU, ALL)) == {
        "iteration-time": 7.1227,
        "throughput": 8.0,
        "mem-reserved-bytes": 30,
        "mem-allocated-bytes": 10,
        "mem-max-allocated-bytes": 20,
        "mem-allocated-count": 50,
    }


def test_the_bytes_of_every_link_that_the_run_has_are_drawn_and_are_those_of_the_record() -> None:
    drawn = iteration_scalars(ON_GPU, ALL)
    assert OURS.items() <= drawn.items()
    without = replace(ON_GPU, inter_node_bytes=0, tensor_link_bytes=0, context_link_bytes=0, context_inter_node_bytes=0)
    of_nodes = ["inter_node_bytes", "inter_node_bytes_per_iteration", "intra_node_bytes"]
    assert [tag for tag in iteration_scalars(without, ALL) if tag.startswith("Traffic/")] == [f"Traffic/{key}" for key in of_nodes]
    links = {key: value for key, value in ON_GPU.json_object().items() if "_node_bytes" in key or key.endswith("_link_bytes")}
    assert {tag.partition("/")[2]: value for tag, value in drawn.items() if tag.startswith("Traffic/")} == links


def test_the_groups_that_tensorboard_opens_are_losses_and_then_bytes() -> None:
    drawn = {**interval_scalars(ON_GPU, ALL), **iteration_scalars(ON_GPU, ALL), **timer_scalars({"forward-backward": [1.0]})}
    drawn |= {**validation_scalars(2.0, ALL), **validation_loss(2.0), **validation_loss(2.0, set_name="books")}
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(drawn)))  # as TensorBoard sorts them
    assert groups[:2] == ["Loss", "Traffic"]
    assert [tag for tag in sorted(drawn) if tag.startswith("Loss/")] == ["Loss/training", "Loss/validation", "Loss/validation-books"]


def test_what_is_not_wanted_or_not_known_is_left_out():
    least = ScalarChoice(learning_rate=False, loss_scale=False)
    assert list(interval_scalars(REPORT, least)) == ["batch-size", "lm loss", "grad-norm"]
    assert list(without_ours(iteration_scalars(REPORT, least))) == ["iteration-time", "throughput"]
    assert list(without_ours(iteration_scalars(REPORT, ALL))) == [
        "iteration-time",
        "throughput",
        "mem-allocated-bytes",
        "mem-max-allocated-bytes",
    ]


def test_a_validation_has_its_loss_and_where_wanted_its_perplexity():
    assert validation_scalars(0.0, ALL) == {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}
    assert validation_scalars(0.0, ScalarChoice(), set_name="books") == {"lm loss validation-books": 0.0}


def test_a_timer_is_drawn_by_its_slowest_rank_in_seconds():
    assert timer_scalars({"optimizer": [1.0, 4.0, 2.0]}) == {"optimizer-time": 0.004}
