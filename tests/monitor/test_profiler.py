"""Chrome traces."""

import json

import pytest
import torch
from torch.profiler import record_function

from megatron_zpp.monitor.profiler import Profiler, move_units_to_a_row


def ranges_of(path):
    """The row of each named range of a trace, by name."""
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"]: event["tid"] for event in events if event.get("cat") == "user_annotation"}


def iterate(profiler, iterations, first=1):
    """The lines that the profiler returns before each iteration and at the end."""
    said = []
    for iteration in range(first, first + iterations):
        said.append(profiler.before_step(iteration))
        with profiler.span(f"iteration {iteration}"), profiler.span("forward block.0"):
            torch.ones(2).add_(1)
    return [*said, profiler.finish(first + iterations - 1)]


def test_the_iterations_asked_for_are_in_the_trace_and_counted_from_where_this_process_began(tmp_path):
    said = iterate(Profiler(1, 3, tmp_path / "traces", rank=2), iterations=5, first=101)
    path = tmp_path / "traces" / "iterations_102-103_rank_2.pt.trace.json"
    assert said == ["", "", "", f"profile of iterations 102 to 103 on rank 2: {path}", "", ""]
    ranges = ranges_of(path)
    assert {"iteration 102", "iteration 103", "forward block.0"} <= set(ranges) and not {"iteration 101", "iteration 104"} & set(ranges)
    assert ranges["forward block.0"] == "units" and ranges["iteration 102"] != "units"


def test_a_run_that_ends_earlier_leaves_a_trace_of_what_it_did(tmp_path):
    said = iterate(Profiler(1, 9, tmp_path, rank=0), iterations=2)
    assert "iteration 2" in ranges_of(tmp_path / "iterations_2-2_rank_0.pt.trace.json") and said[-1].startswith(
        "profile of iterations 2 to 2"
    )


def test_a_run_that_ends_before_leaves_nothing(tmp_path):
    assert iterate(Profiler(5, 6, tmp_path, rank=0), iterations=2) == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


def test_moving_units_leaves_everything_else_as_it_is(tmp_path):
    path = tmp_path / "trace.json"
    with torch.profiler.profile() as profile, record_function("backward block.1"), record_function("optimizer"):
        torch.ones(2).add_(1)
    profile.export_chrome_trace(str(path))
    before = json.loads(path.read_text())
    move_units_to_a_row(path)
    after = json.loads(path.read_text())
    moved = [event for event, other in zip(before["traceEvents"], after["traceEvents"], strict=True) if event != other]
    assert [event["name"] for event in moved] == ["backward block.1"]
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_units_are_found_in_the_other_form_of_traces_too(tmp_path):
    """Some versions of torch write an event's head on one line."""
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "forward block.0", "pid": 1, "tid": 7},
        {"ph": "X", "cat": "user_annotation", "name": "forward-compute", "pid": 1, "tid": 7},
        {"ph": "X", "cat": "cpu_op", "name": "forward block.0", "pid": 1, "tid": 7},
    ]
    path = tmp_path / "trace.json"
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n")
    move_units_to_a_row(path)
    assert [event["tid"] for event in json.loads(path.read_text())] == ["units", 7, 7]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nvtx_ranges_may_overlap():
    from megatron_zpp.monitor.profiler import nvtx_span

    first, second = nvtx_span("first"), nvtx_span("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
