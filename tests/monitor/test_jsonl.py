"""One JSON object per line."""

import json
import math
import os
import socket
import subprocess
import sys

import pytest
from harness.places import ROOT
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.monitor.jsonl import JsonLinesWriter
from megatron_zpp.system.user_error import UserError


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
    with pytest.raises(UserError, match=f"^--log-jsonl {tmp_path} cannot be written .*; choose a file in a writable folder"):
        JsonLinesWriter(tmp_path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, make):
    make(tmp_path / "run.jsonl")
    with pytest.raises(UserError, match="^--log-jsonl .*run.jsonl cannot be written .*; choose a file in a writable folder"):
        JsonLinesWriter(tmp_path / "run.jsonl")


def test_the_null_device_and_links_to_files_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run.jsonl")
    for path in ("/dev/null", tmp_path / "link"):
        with JsonLinesWriter(path) as writer:
            writer.write({"iteration": 1})
    assert read_back(tmp_path / "run.jsonl") == [{"iteration": 1}]


@pytest.mark.parametrize("is_pipe", [True, False])
def test_lines_can_go_to_standard_output(tmp_path, is_pipe):
    imports = "from megatron_zpp.monitor.jsonl import JsonLinesWriter"
    program = f"{imports}; print('before', flush=True); JsonLinesWriter('/dev/stdout').write({{'a': 1}})"
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE if is_pipe else out, text=True, check=True)
    assert (done.stdout if is_pipe else (tmp_path / "out").read_text()) == 'before\n{"a": 1}\n'
