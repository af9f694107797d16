import json
import math
import random
from pathlib import Path

import pytest
from harness.tool import write_json_lines
from hypothesis import given
from hypothesis import strategies as st
from run_logs.history import AXES, RunHistory, read_history

from megatron_zpp.system import outside
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError

pytestmark = pytest.mark.pure

LOG = OutsideFile(Path("log.jsonl"), "log.jsonl")


def line(iteration: int, loss: float = 1.0, interval: int = 10, ms: float = 1000.0, nbytes: float = 5.0) -> dict[str, float]:
    means = {"interval_iterations": interval, "elapsed_ms_per_iteration": ms, "inter_node_bytes_per_iteration": nbytes}
    return {"iteration": iteration, "lm_loss": loss, **means}


def validation(iteration: int, loss: float, **set_name: str) -> dict[str, object]:
    return {"iteration": iteration, "validation_loss": loss, **set_name}


def history_of(*records: dict[str, object]) -> RunHistory:
    history = RunHistory("run")
    for record in records:
        history.add(Members(record, LOG))
    return history


def test_time_and_bytes_are_the_sums_over_all_iterations_of_every_line() -> None:
    history = history_of(line(10, ms=100), line(20, ms=300, nbytes=7), line(25, interval=5, ms=200))
    assert history.positions(AXES["seconds"]) == pytest.approx([1.0, 4.0, 5.0])
    assert history.positions(AXES["bytes"]) == [50.0, 120.0, 145.0]
    assert history.notes() == []


def test_a_logged_rate_that_is_not_a_number_stays_and_a_missing_one_does_not() -> None:
    history = history_of(line(10) | {"learning_rate": 0.5}, line(20) | {"learning_rate": math.nan}, line(30))
    assert str(history.curve("learning_rate")) == "{10: 0.5, 20: nan}"  # as text, because NaN differs from itself
    history.require("elapsed_ms_per_iteration", remedy="")
    with pytest.raises(UserError, match="^run lacks learning_rate in a training line; train again"):
        history.require("learning_rate", remedy="train again")
    assert str(history_of(line(10), line(20) | {"learning_rate": math.nan}).latest("learning_rate")) == "nan"


def test_a_resumed_run_replaces_all_that_was_logged_after_its_checkpoint() -> None:
    before = [line(10, 7.0), validation(10, 7.1), line(20, 6.0), validation(20, 6.1), line(30, 5.0)]
    history = history_of(*before, line(20, 6.5, interval=5))
    assert history.losses() == {10: 7.0, 20: 6.5}
    assert history.validations == {"": [(10, 7.1)]}
    assert history.positions(AXES["seconds"]) == [10.0, 20.0]  # the five iterations between belong to no line any more


def test_a_resumed_run_with_another_log_interval_replaces_the_lines_of_its_steps() -> None:
    lines = [line(10, 7.0), line(20, 6.0), line(25, 5.5, interval=5), line(30, 5.0, interval=5), validation(30, 5.1)]
    history = history_of(*lines, line(100, 4.0, interval=80))  # resumed at 20
    assert history.losses() == {10: 7.0, 20: 6.0, 100: 4.0}
    assert history.unlogged_iterations() == 0
    history = history_of(*lines[:3], line(30, 4.0))  # the first job ended at 25
    assert history.losses() == {10: 7.0, 20: 6.0, 30: 4.0}


def test_a_resumed_run_replaces_the_validations_of_the_steps_that_it_repeats_and_keeps_its_own() -> None:
    before = [line(10), validation(10, 7.0), validation(15, 6.5), line(20), validation(20, 6.0), validation(25, 5.5), line(30)]
    for resumed, expected in (
        ([line(40, interval=30)], [(10, 7.0)]),  # after 10, without a validation of its own
        ([validation(12, 1.0), line(40, interval=30)], [(10, 7.0), (12, 1.0)]),
        ([validation(15, 1.0), line(40, interval=30)], [(10, 7.0), (15, 1.0)]),
        ([validation(30, 1.0), line(40, interval=20)], [(10, 7.0), (15, 6.5), (20, 6.0)]),  # of the line before, which is replaced
        ([line(22, interval=2)], [(10, 7.0), (15, 6.5), (20, 6.0)]),
        ([line(40)], [(10, 7.0), (15, 6.5), (20, 6.0), (25, 5.5)]),  # after 30, so it repeats nothing
    ):
        assert history_of(*before, *resumed).validations == {"": expected}


def test_an_evaluation_of_an_earlier_checkpoint_leaves_the_lines_after_it() -> None:
    records = [line(10), validation(10, 7.0), line(20), validation(20, 6.0), line(30), validation(30, 5.0)]
    history = history_of(*records, validation(20, 6.5))
    assert list(history.losses()) == [10, 20, 30]
    assert history.validations == {"": [(10, 7.0), (20, 6.5), (30, 5.0)]}


def test_a_validation_stays_before_the_line_of_its_own_iteration() -> None:
    """As with --iterations-to-skip 5 6 7 8 9 10: the last line follows the validation."""
    history = history_of(validation(10, 7.0), line(10, interval=4))
    assert history.validations == {"": [(10, 7.0)]} and list(history.losses()) == [10]


def test_iterations_that_no_line_has_are_told_and_count_like_those_of_the_next_line() -> None:
    history = history_of(line(10), line(30, interval=4, ms=500))
    assert history.positions(AXES["seconds"]) == [10.0, 20.0]
    assert history.unlogged_iterations() == 16
    assert history.notes() == ["run: 16 iterations are in no line of the log, and counted as in the next line"]


def test_a_log_that_begins_with_a_resumed_run_counts_from_there_and_says_so() -> None:
    history = history_of(line(110), line(120))
    assert history.positions(AXES["seconds"]) == [10.0, 20.0]
    assert history.notes() == ["run: the log begins with iteration 101; time and bytes before it are not counted"]


def test_lines_that_a_later_job_replaces_are_told() -> None:
    said = "run: later jobs repeat logged steps (2 times), which replaces 3 lines; jobs that train at the same time need a log each"
    lines = [line(10), line(20), line(10), line(20), line(20)]
    assert history_of(*lines).notes(of_sums=False) == [said]
    assert history_of(*lines[:2]).notes(of_sums=False) == []


def test_a_validation_stands_between_the_lines_around_it() -> None:
    history = history_of(line(10), validation(15, 3.0), line(20))
    seconds = history.positions(AXES["seconds"])
    assert [history.place(iteration, seconds, AXES["seconds"]) for iteration in (5, 10, 15, 20, 99)] == [5.0, 10.0, 15.0, 20.0, 20.0]


def test_validations_of_several_sets_do_not_replace_each_other() -> None:
    history = history_of(line(10), validation(10, 3.0, validation_set="a"), validation(10, 4.0, validation_set="b"))
    assert history.validations == {"a": [(10, 3.0)], "b": [(10, 4.0)]}


def test_an_object_with_a_value_of_the_wrong_kind_changes_nothing() -> None:
    history = history_of(line(10), line(20))
    for wrong in (line(10) | {"lm_loss": "x"}, line(10) | {"interval_iterations": 0}, line(10) | {"eta_seconds": float("inf")}, {}):
        with pytest.raises(UserError, match=r"log\.jsonl"):
            history.add(Members(wrong, LOG))
    assert list(history.losses()) == [10, 20]


def test_a_log_without_a_key_is_refused_by_its_name_and_the_keys() -> None:
    history = history_of({"iteration": 1, "lm_loss": 1.0, "elapsed_ms_per_iteration": 1.0})
    with pytest.raises(UserError, match="run lacks interval_iterations"):
        history.positions(AXES["seconds"])


@given(
    jobs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 7)), min_size=1, max_size=5),
    eval_interval=st.integers(1, 9),
)
def test_whatever_resumed_from_where_the_steps_of_the_final_model_count_once(jobs: list[tuple[int, int, int]], eval_interval: int) -> None:
    """jobs: where each resumes, as far as the ones before have come, how many iterations it does, and its --log-interval.

    Each logs its last iteration. Its losses, also of validations, are its number.
    """
    history, done = RunHistory("run"), 0
    expected: dict[int, float] = {}
    validated: dict[int, float] = {}
    for number, (resumed, count, interval) in enumerate(jobs):
        start = min(resumed, done)
        expected = {iteration: loss for iteration, loss in expected.items() if iteration <= start}
        validated = {iteration: loss for iteration, loss in validated.items() if iteration <= start}
        last = start
        for iteration in range(start + 1, start + count + 1):
            if iteration % interval == 0 or iteration == start + count:
                history.add(Members(line(iteration, float(number), interval=iteration - last), LOG))
                last, expected[iteration] = iteration, float(number)
            if iteration % eval_interval == 0:
                history.add(Members(validation(iteration, float(number)), LOG))
                validated[iteration] = float(number)
        done = start + count
    assert history.losses() == expected
    assert history.validations.get("", []) == list(validated.items())
    assert history.positions(AXES["seconds"]) == pytest.approx(list(expected))


def test_a_file_gives_the_same_history_whatever_line_a_killed_run_left_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [line(10 * index, 1 / index) for index in range(1, 6)]
    path = write_json_lines(tmp_path / "log.jsonl", records)
    whole = read_history(path, "run").losses()
    texts = path.read_text().splitlines()
    texts.insert(random.Random(0).randrange(6), '{"iteration": 25, "lm_l')
    path.write_text("\n".join(texts))
    assert read_history(path, "run").losses() == whole
    assert "unfinished" in capsys.readouterr().err


def test_lines_that_are_not_json_are_told_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(" iteration 1/ 2 | lm loss: 7.0 |\n" * 9)  # the run's output instead of its --log-jsonl
    with pytest.raises(UserError, match="holds no training iteration"):
        read_history(path, "run")
    path.write_text(path.read_text() + json.dumps(line(10)))
    read_history(path, "run")
    assert capsys.readouterr().err == f"{path}, line 1: unfinished, left out with 8 later lines\n"


def test_a_log_is_read_line_by_line_however_large_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json_lines(tmp_path / "log.jsonl", [line(10 * index) for index in range(1, 9)])
    monkeypatch.setattr(outside, "LOG_LINE_BYTES", 200)
    assert path.stat().st_size > 5 * 200
    assert list(read_history(path, "run").losses()) == list(range(10, 90, 10))
