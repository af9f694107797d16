"""Compares the lines that scripts parse with lines written by hand."""

import json
import math
import re
from dataclasses import replace
from datetime import datetime

import pytest
from harness.sample_report import REPORT

from megatron_zpp.monitor.training_line import megatron_lm_line, perplexity_of, samples_line, training_line, validation_lines

PUBLISHED_KEYS = (
    "iteration consumed_samples consumed_tokens lm_loss learning_rate global_batch_size grad_norm loss_scale skipped_iterations "
    "nan_iterations elapsed_ms_per_iteration tokens_per_second tflops_per_gpu inter_node_bytes intra_node_bytes model_state_bytes "
    "max_memory_bytes data_ms_per_iteration model_tflops_per_gpu mfu hfu params_norm num_zeros eta_seconds tensor_link_bytes "
    "host_state_bytes context_link_bytes context_inter_node_bytes train_iters interval_iterations inter_node_bytes_per_iteration"
).split()
# What programs for Megatron's logs search for, by the name of the field; numbers in any notation, and nan and inf.
NUMBER = r"(-?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
MEGATRONS_FIELDS = {
    "iteration": r"iteration\s+(\d+)/\s*\d+ \|",
    "train_iters": r"iteration\s+\d+/\s*(\d+) \|",
    "consumed_samples": r"\| consumed samples:\s+(\d+) \|",
    "consumed_tokens": r"\| consumed tokens:\s+(\d+) \|",
    "elapsed_ms_per_iteration": rf"\| elapsed time per iteration \(ms\): {NUMBER} \|",
    "learning_rate": rf"\| learning rate: {NUMBER} \|",
    "global_batch_size": r"\| global batch size:\s+(\d+) \|",
    "lm_loss": rf"\| lm loss: {NUMBER} \|",
    "loss_scale": rf"\| loss scale: {NUMBER} \|",
    "grad_norm": rf"\| grad norm: {NUMBER} \|",
    "num_zeros": rf"\| num zeros: {NUMBER} \|",
    "params_norm": rf"\| params norm: {NUMBER} \|",
    "seq_length": r"\| actual seqlen:\s+(\d+) \|",
    "skipped_iterations": r"\| number of skipped iterations:\s+(\d+) \|",
    "nan_iterations": r"\| number of nan iterations:\s+(\d+) \|",
    "samples_per_second": rf"\| samples per second: {NUMBER} \|",
    "tokens_per_gpu_per_second": rf"\| tokens per gpu per second \(tgs\): {NUMBER} \|",
    "tflops_per_gpu": rf"\| TFLOPs: {NUMBER} \|",
    "model_tflops_per_gpu": rf"\| throughput per GPU \(TFLOP/s/GPU\): {NUMBER} \|",
}
EVERYTHING = replace(REPORT, num_zeros=1234, params_norm=98.7654, peak_tflops=125.0)


def test_training_line_is_the_tutorials_with_grad_norm_and_tgs_and_eta():
    assert training_line(REPORT) == (
        " iteration       20/27465820 | consumed samples:         1280 | consumed tokens:       655360 | "
        "elapsed time per iteration (ms): 7122.7 | learning rate: 3.000000E-04 | global batch size:    64 | lm loss: 1.490005E+01 | "
        "loss scale: 2048.0 | grad norm: 1.234 | actual seqlen:   512 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 | samples per second: 8.985 | tokens per gpu per second (tgs): 71.883 | TFLOPs: 10.70 | "
        "ETA: 2264d 05h 50m 54s |"
    )


def test_megatron_lms_line_begins_with_the_date_and_has_its_fields_alone():
    at = datetime(2026, 8, 22, 15, 4, 5, 678)
    assert megatron_lm_line(REPORT, at) == (
        " [2026-08-22 15:04:05.000678] iteration       20/27465820 | consumed samples:         1280 | "
        "elapsed time per iteration (ms): 7122.7 | learning rate: 3.000000E-04 | global batch size:    64 | lm loss: 1.490005E+01 | "
        "loss scale: 2048.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    line = megatron_lm_line(EVERYTHING, at, with_throughput=True)
    assert "(ms): 7122.7 | throughput per GPU (TFLOP/s/GPU): 8.0 | learning rate: 3.000000E-04 |" in line
    assert "| grad norm: 1.234 | num zeros: 1234.0 | params norm: 98.765 | number of skipped iterations:   0 |" in line


def test_what_is_asked_for_stands_in_megatrons_places_and_what_is_new_at_the_end():
    line = training_line(EVERYTHING, with_throughput=True)
    assert "| grad norm: 1.234 | num zeros: 1234.0 | params norm: 98.765 | actual seqlen:   512 |" in line
    assert "| TFLOPs: 10.70 | throughput per GPU (TFLOP/s/GPU): 8.0 | MFU: 6.4% | HFU: 8.6% | ETA: " in line


def test_a_parser_of_megatrons_lines_reads_every_field():
    line = training_line(EVERYTHING, with_throughput=True)
    for field, pattern in MEGATRONS_FIELDS.items():
        found = re.search(pattern, line)
        assert found, field
        assert float(found[1]) == pytest.approx(getattr(EVERYTHING, field), rel=0.01)


@pytest.mark.parametrize("field", ["lm_loss", "grad_norm", "params_norm"])
def test_a_parser_of_megatrons_lines_reads_nan(field):
    line = training_line(replace(EVERYTHING, **{field: math.nan}))
    assert math.isnan(float(re.search(MEGATRONS_FIELDS[field], line)[1]))


def test_utilization_is_a_share_of_the_peak_and_unknown_without_one():
    assert (EVERYTHING.mfu, EVERYTHING.hfu) == (8.0 / 125.0, 10.7 / 125.0)
    assert (REPORT.mfu, REPORT.hfu) == (None, None)
    assert "MFU" not in training_line(REPORT)


def test_eta_is_what_the_remaining_iterations_take_at_this_pace():
    report = replace(REPORT, iteration=90, train_iters=100, elapsed_ms_per_iteration=9000.4)
    assert report.eta_seconds == pytest.approx(90.004)
    assert training_line(report).endswith("| ETA: 00h 01m 30s |")


@pytest.mark.parametrize("value, text", [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_loss_that_is_not_finite_is_printed_and_no_field_vanishes(value, text):
    line = training_line(replace(REPORT, lm_loss=value, grad_norm=value))
    assert f"| lm loss: {text} |" in line and f"| grad norm: {text} |" in line
    assert line.count("|") == training_line(REPORT).count("|")


def test_fields_can_be_parsed_back():
    line = training_line(replace(REPORT, skipped_iterations=3, nan_iterations=2))
    assert re.search(r"iteration\s+(\d+)/\s*(\d+) \|", line).groups() == ("20", "27465820")
    fields = dict(part.split(":") for part in line.removesuffix(" |").split(" | ")[1:])
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


def test_one_of_several_validation_sets_is_named_as_in_megatron():
    line = validation_lines(1000, 2.0, set_name="books").split("\n")[1]
    assert line == " validation-books loss at iteration 1000 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "


def test_final_validation_names_its_set():
    line = validation_lines(7, math.nan, drawn_from=" on test set").split("\n")[1]
    assert line == " validation loss at iteration 7 on test set | lm loss value: nan | lm loss PPL: nan | "


def test_perplexity_is_cut_off_at_exp_20():
    assert perplexity_of(25.0) == perplexity_of(20.0) == math.exp(20)
    assert math.isnan(perplexity_of(math.nan))


def test_samples_line_has_counts_and_shares():
    assert samples_line({"a": 1, "b": 3}) == " consumed samples per source | a: 1 (25.00 %) | b: 3 (75.00 %) |"
    assert samples_line({"a": 0}) == " consumed samples per source | a: 0 (0.00 %) |"
