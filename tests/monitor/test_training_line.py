"""The lines that scripts read, against lines written out by hand."""

import json
import math
import re
from dataclasses import replace

import pytest

from megatron_zpp.monitor.interval_report import IntervalReport
from megatron_zpp.monitor.training_line import perplexity_of, samples_line, training_line, validation_lines

# Iteration 20 of the ZeRO++ tutorial's 64-GPU run.
REPORT = IntervalReport(
    iteration=20,
    train_iters=27465820,
    consumed_samples=1280,
    global_batch_size=64,
    samples_per_iteration=64.0,
    seq_length=512,
    world_size=64,
    elapsed_ms_per_iteration=7122.7,
    data_ms_per_iteration=0.5,
    learning_rate=3e-4,
    lm_loss=14.90005,
    loss_scale=2048.0,
    grad_norm=1.2345,
    skipped_iterations=0,
    nan_iterations=0,
    tflops_per_gpu=10.7,
    inter_node_bytes=11,
    intra_node_bytes=22,
    model_state_bytes=33,
    max_memory_bytes=44,
)
PUBLISHED_KEYS = (
    "iteration consumed_samples consumed_tokens lm_loss learning_rate global_batch_size grad_norm loss_scale skipped_iterations "
    "nan_iterations elapsed_ms_per_iteration tokens_per_second tflops_per_gpu inter_node_bytes intra_node_bytes model_state_bytes "
    "max_memory_bytes data_ms_per_iteration"
).split()


def test_training_line_is_the_tutorials_with_grad_norm_and_tgs():
    assert training_line(REPORT) == (
        " iteration       20/27465820 | consumed samples:         1280 | consumed tokens:       655360 | "
        "elapsed time per iteration (ms): 7122.7 | learning rate: 3.000E-04 | global batch size:    64 | lm loss: 1.490005E+01 | "
        "loss scale: 2048.0 | grad norm: 1.234 | actual seqlen:   512 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 | samples per second: 8.985 | tokens per gpu per second (tgs): 71.883 | TFLOPs: 10.70 |"
    )


@pytest.mark.parametrize("value, text", [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_loss_that_is_not_finite_is_printed_and_no_field_vanishes(value, text):
    line = training_line(replace(REPORT, lm_loss=value, grad_norm=value))
    assert f"| lm loss: {text} |" in line and f"| grad norm: {text} |" in line
    assert line.count("|") == training_line(REPORT).count("|")


def test_fields_can_be_parsed_back():
    line = training_line(replace(REPORT, skipped_iterations=3, nan_iterations=2))
    assert re.search(r"iteration\s+(\d+)/\s*(\d+) \|", line).groups() == ("20", "27465820")
    fields = dict(part.split(":") for part in line.split(" | ")[1:])
    assert (int(fields["number of skipped iterations"]), int(fields["number of nan iterations"])) == (3, 2)


def test_rates_follow_from_batch_and_time():
    report = replace(REPORT, elapsed_ms_per_iteration=500.0)
    assert (report.samples_per_second, report.tokens_per_second, report.tokens_per_gpu_per_second) == (128.0, 65536.0, 1024.0)


def test_json_object_has_every_key_and_unrounded_values():
    values = json.loads(json.dumps(REPORT.json_object()))
    assert list(values) == PUBLISHED_KEYS
    assert values["lm_loss"] == 14.90005 and values["tokens_per_second"] == 64 * 512 * 1000 / 7122.7


def test_validation_line_is_framed_by_dashes_one_longer():
    above, line, below = validation_lines(1000, 2.0).split("\n")
    assert line == " validation loss at iteration 1000 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert above == below == "-" * (len(line) + 1)


def test_final_validation_names_its_set():
    line = validation_lines(7, math.nan, drawn_from=" on test set").split("\n")[1]
    assert line == " validation loss at iteration 7 on test set | lm loss value: nan | lm loss PPL: nan | "


def test_perplexity_is_cut_off_at_exp_20():
    assert perplexity_of(25.0) == perplexity_of(20.0) == math.exp(20)
    assert math.isnan(perplexity_of(math.nan))


def test_samples_line_has_counts_and_shares():
    assert samples_line({"a": 1, "b": 3}) == " consumed samples per source | a: 1 (25.00 %) | b: 3 (75.00 %) |"
    assert samples_line({"a": 0}) == " consumed samples per source | a: 0 (0.00 %) |"
