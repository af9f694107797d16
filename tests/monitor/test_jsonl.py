"""One JSON object per line."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.monitor.jsonl import JsonLinesWriter


def read_back(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(st.floats())
def test_every_float_comes_back_bit_for_bit(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("jsonl") / "run.jsonl"
    with JsonLinesWriter(path) as writer:
        writer.write({"lm_loss": value})
    ((read,),) = [row.values() for row in read_back(path)]
    assert (read == value and math.copysign(1, read) == math.copysign(1, value)) or (math.isnan(read) and math.isnan(value))


def test_nan_is_written_as_nan(tmp_path):
    path = tmp_path / "run.jsonl"
    with JsonLinesWriter(path) as writer:
        writer.write({"lm_loss": float("nan"), "iteration": 3})
    assert path.read_text() == '{"lm_loss": NaN, "iteration": 3}\n'


def test_line_can_be_read_while_the_run_goes_on(tmp_path):
    path = tmp_path / "run.jsonl"
    with JsonLinesWriter(path) as writer:
        writer.write({"iteration": 1})
        assert read_back(path) == [{"iteration": 1}]


def test_resumed_run_appends(tmp_path):
    path = tmp_path / "folder" / "run.jsonl"
    for iteration in (1, 2):
        with JsonLinesWriter(path) as writer:
            writer.write({"iteration": iteration})
    assert read_back(path) == [{"iteration": 1}, {"iteration": 2}]


def test_half_a_line_of_a_killed_run_spoils_only_itself(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"iteration": 1}\n{"iter')
    with JsonLinesWriter(path) as writer:
        writer.write({"iteration": 3})
    assert path.read_text() == '{"iteration": 1}\n{"iter\n{"iteration": 3}\n'


def test_file_that_cannot_be_written_names_flag_path_and_remedy(tmp_path):
    with pytest.raises(ValueError, match=f"^--log-jsonl {tmp_path} cannot be written .*; choose a file in a writable folder"):
        JsonLinesWriter(tmp_path)
