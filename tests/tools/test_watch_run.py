import argparse
import io
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
from cli.command import printable, run_command
from harness.places import ROOT
from harness.tool import run_tool, write_json_lines
from hypothesis import given
from hypothesis import strategies as st
from run_logs.braille import BrailleCanvas
from run_logs.followed_file import FollowedFile
from run_logs.followed_run import FollowedRun
from run_logs.history import AXES, RunHistory
from run_logs.loss_chart import LABEL_COLUMNS, loss_chart, outline
from run_logs.view import Screen, duration, frame, status
from watch_run import follow, screen_of

from megatron_zpp.system.outside import Members, OutsideFile

PLAIN = Screen(columns=80, rows=24, has_colour=False, has_unicode=True)
ITERATION = AXES["iteration"]


def line(iteration: int, loss: float, **more: float) -> dict[str, float]:
    means = {"interval_iterations": 10, "elapsed_ms_per_iteration": 1000.0, "tokens_per_second": 1234.0, "model_tflops_per_gpu": 0.5}
    traffic = {"inter_node_bytes": 4_090_000, "intra_node_bytes": 6_790_000, "tensor_link_bytes": 0}
    return {"iteration": iteration, "lm_loss": loss, "train_iters": 90, "eta_seconds": 61.0, **means, **traffic, **more}


def followed(path: Path, name: str = "run") -> FollowedRun:
    run = FollowedRun(path, name)
    run.read_on()
    return run


def same(text: str, _: int) -> str:
    return text


@pytest.fixture
def log(tmp_path: Path) -> Path:
    records = [line(10, 7.0), line(20, 6.0), {"iteration": 20, "validation_loss": 6.5}, line(30, 5.5, skipped_iterations=2)]
    return write_json_lines(tmp_path / "log.jsonl", records)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Times:
    """A pause that does what is next, and ends with Ctrl-C when nothing is left."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def pause(self) -> None:
        if not self.steps:
            raise KeyboardInterrupt
        self.steps.pop(0)()


def append(path: Path, *records: dict[str, float]) -> Callable[[], object]:
    def write() -> None:
        text = write_json_lines(path.with_suffix(".more"), records).read_text()
        with path.open("a") as file:
            file.write(text)

    return write


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    canvas = BrailleCanvas(2, 1)
    canvas.line([(0.0, 1.0), (1.0, 0.0)], 0)
    assert canvas.text(same) == ["\u2811\u2884"]


def test_a_value_that_is_not_finite_interrupts_the_line_and_a_mark_stays() -> None:
    canvas = BrailleCanvas(3, 1)
    canvas.mark(0.5, 0.5, "o", 0)
    canvas.line([(0.0, 0.5), (0.5, float("nan")), (1.0, 0.5)], 1)
    first, mark, last = canvas.text(same)[0]
    assert mark == "o" and bin(ord(first) - 0x2800).count("1") == bin(ord(last) - 0x2800).count("1") == 1


@given(
    points=st.lists(st.tuples(st.floats(-1, 2), st.floats(allow_nan=True)), max_size=8), columns=st.integers(1, 9), rows=st.integers(1, 5)
)
def test_no_point_is_drawn_outside_the_canvas(points: list[tuple[float, float]], columns: int, rows: int) -> None:
    canvas = BrailleCanvas(columns, rows)
    canvas.line(points, 0)
    for point in points:
        canvas.mark(*point, "o", 0)
    assert [len(row) for row in canvas.text(same)] == [columns] * rows


LOSS = st.floats(0, 1) | st.floats(0.4, 0.5) | st.sampled_from([float("nan"), float("inf")])


@given(
    steps=st.lists(st.sampled_from([0.001, 0.02, 0.3]), max_size=40), losses=st.data(), columns=st.integers(1, 9), rows=st.integers(1, 5)
)
def test_the_outline_of_a_curve_has_the_dots_of_all_its_points(steps: list[float], losses: st.DataObject, columns: int, rows: int) -> None:
    places = [min(1.0, place) for place in accumulate(steps)]
    values = array("d", losses.draw(st.lists(LOSS, min_size=len(places), max_size=len(places))))
    whole, outlined = BrailleCanvas(columns, rows), BrailleCanvas(columns, rows)
    whole.line(list(zip(places, values, strict=True)), 0)
    outlined.line(list(outline(places, values, lambda place: outlined.dot(place, 0.0)[0])), 0)
    assert outlined.text(same) == whole.text(same)


def test_a_long_run_is_drawn_from_few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    history, drawn = RunHistory("run"), list[int]()
    for iteration in range(1, 5001):
        history.add(Members(line(iteration, iteration * 7919 % 100 / 10, interval_iterations=1), OutsideFile(Path("log"), "log")))
    monkeypatch.setattr(BrailleCanvas, "line", lambda canvas, points, ink: drawn.append(len(points)))
    loss_chart([history], ITERATION, columns=LABEL_COLUMNS + 10, rows=5, paint=same)
    assert drawn == [4 * 20]


def test_a_frame_has_the_losses_and_how_far_the_run_is(log: Path) -> None:
    text = frame([followed(log)], ITERATION, PLAIN, now=os.stat(log).st_mtime)
    assert "run: iteration 30 of 90, loss 5.5000, validation 6.5000 at 20, 2 skipped, 1m 1s\n    left\n" in text
    assert "1234 tokens/s, 0.5 TFLOP/s per rank" in text
    assert "per step 4.09 MB into a node from others, 6.79 MB into a rank in its node\n" in text + "\n"
    rows = text.splitlines()
    assert rows[0].startswith("          7 |\u2811") and len(rows) <= PLAIN.rows and all(len(row) < PLAIN.columns for row in rows)
    assert "o" in "".join(row[LABEL_COLUMNS:] for row in rows[:12]) and "iteration, o: validation" in rows[-5]
    assert "WARNING" not in text and "\x1b" not in text


def test_a_log_that_has_not_grown_for_long_is_told_unless_the_run_has_ended(log: Path) -> None:
    written = os.stat(log).st_mtime
    assert "has not grown for 1m 1s" in frame([followed(log)], ITERATION, PLAIN, now=written + 61)
    append(log, line(40, 5.0, elapsed_ms_per_iteration=60_000.0))()
    os.utime(log, (written, written))
    assert "WARNING" not in frame([followed(log)], ITERATION, PLAIN, now=written + 5 * 600)
    assert "WARNING" in frame([followed(log)], ITERATION, PLAIN, now=written + 5 * 600 + 1)
    append(log, line(90, 5.0))()
    assert "WARNING" not in frame([followed(log)], ITERATION, PLAIN, now=written + 1e6)


def test_a_run_is_watched_until_its_last_evaluation(log: Path) -> None:
    output = io.StringIO()
    last = line(90, 5.0, final_evaluations=2)
    times = Times(
        append(log, last), append(log, {"iteration": 90, "validation_loss": 5.25}), append(log, {"iteration": 90, "test_loss": 5.5})
    )
    follow([FollowedRun(log, "run")], ITERATION, output, times.pause, lambda: 0.0)
    assert times.steps == [] and output.getvalue().splitlines()[-1].startswith(
        "run: iteration 90 of 90, loss 5.0000, validation 5.2500 at 90"
    )


def test_a_run_whose_last_iterations_were_left_out_ends_with_its_last_evaluation(log: Path) -> None:
    append(log, line(80, 5.0, final_evaluations=1))()
    assert not followed(log).is_finished
    append(log, {"iteration": 80, "validation_loss": 5.25})()
    assert not followed(log).is_finished
    append(log, {"iteration": 90, "validation_loss": 5.25})()  # as with --iterations-to-skip 81 82 ... 90
    assert followed(log).is_finished


def test_steps_that_a_job_repeats_are_told(log: Path) -> None:
    append(log, line(20, 6.1), line(30, 5.6), line(10, 7.1))()
    assert "steps repeated 2 times" in status(followed(log))


def test_a_frame_of_many_runs_fits_the_terminal_without_their_details(log: Path) -> None:
    runs = [followed(log, name) for name in "abcdef"]
    lines = frame(runs, ITERATION, PLAIN, now=0.0).splitlines()
    assert len(lines) < PLAIN.rows and "6 f: iteration 30" in lines[-2] and "tokens/s" not in "".join(lines)


def test_several_runs_end_in_their_numbers_and_one_without_a_loss_is_named(log: Path, tmp_path: Path) -> None:
    other = write_json_lines(tmp_path / "other.jsonl", [line(10, 8.0), line(30, 4.0)])
    runs = [followed(log, "a"), followed(other, "b"), followed(tmp_path / "none.jsonl", "c")]
    text = frame(runs, ITERATION, PLAIN, now=0.0)
    chart = "".join(row[LABEL_COLUMNS:] for row in text.split("1 a:")[0].splitlines()[:-1])
    assert "1" in chart and "2" in chart and "3" not in chart
    assert "1 a: iteration 30" in text and "2 b: iteration 30" in text and "3 c: no such file yet" in text


def test_losses_that_are_not_finite_or_all_alike_are_drawn_as_far_as_they_can_be(tmp_path: Path) -> None:
    for losses in ([float("nan")], [float("inf"), 3.0], [3.0], [3.0, 3.0], [3.0, 1e308, -1.2345e308], [float("nan"), float("-inf")]):
        run = followed(write_json_lines(tmp_path / "log.jsonl", [line(index, loss) for index, loss in enumerate(losses, 1)]))
        chart = loss_chart([run.history], ITERATION, 40, 8, same)
        assert (len(chart) == 8) == (3.0 in losses) and all(len(row) <= 40 for row in chart)
        assert frame([run], ITERATION, PLAIN, now=0.0)


def test_the_ends_of_the_axis_of_iterations_are_whole_numbers(tmp_path: Path) -> None:
    run = followed(write_json_lines(tmp_path / "log.jsonl", [line(12_345, 7.0), line(123_456, 6.0)]))
    axis_row = loss_chart([run.history], ITERATION, 60, 8, same)[-1]
    assert axis_row.split() == ["loss", "12345", "iteration", "123456"]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("columns", [40, 80])
def test_an_axis_has_both_ends_and_a_whole_word_on_every_terminal(log: Path, axis: str, columns: int) -> None:
    logged = {
        "consumed_samples": 1e9,
        "consumed_tokens": 1.23e12,
        "elapsed_ms_per_iteration": 1.2e9,
        "inter_node_bytes_per_iteration": 1e10,
    }
    records = [line(iteration, 4.0, **logged, interval_iterations=1) for iteration in (1, 1_000_000)]
    run = followed(write_json_lines(log, [records[0], {"iteration": 1, "validation_loss": 4.0}, records[1]]))
    row = loss_chart([run.history], AXES[axis], columns - 1, 8, same)[-1]
    ends = {"iteration": "1000000", "samples": "1e+09", "tokens": "1.23e+12", "seconds": "1.2e+12", "bytes": "1e+16"}
    assert len(row) == columns - 1 and row.split()[0] == "loss" and row.endswith(ends[axis]) and f" {axis}" in row


def test_a_file_is_read_on_from_where_it_was_left_and_a_line_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    file = FollowedFile(path)
    assert list(file.new_lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(file.new_lines()) == [None, b"one"]
    with path.open("ab") as more:
        more.write(b"o\nthree\n")
    assert list(file.new_lines()) == [b"two", b"three"]
    assert list(file.new_lines()) == []


def test_a_file_that_is_replaced_or_emptied_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"one\ntwo\n")
    file = FollowedFile(path)
    assert list(file.new_lines()) == [None, b"one", b"two"]
    (tmp_path / "new").write_bytes(b"a longer one than before\n")
    os.replace(tmp_path / "new", path)
    assert list(file.new_lines()) == [None, b"a longer one than before"]
    path.write_bytes(b"short\n")
    assert list(file.new_lines()) == [None, b"short"]
    path.rename(tmp_path / "rotated")
    assert list(file.new_lines()) == []
    (tmp_path / "rotated").rename(path)  # a new file can have the number and the size of one that was removed
    assert list(file.new_lines()) == [None, b"short"]


@given(texts=st.lists(st.binary(max_size=20).filter(lambda text: b"\n" not in text), max_size=8), cuts=st.lists(st.integers(0, 170)))
def test_lines_are_the_same_however_the_file_grows(tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], cuts: list[int]) -> None:
    path = tmp_path_factory.mktemp("grown") / "log.jsonl"
    content = b"".join(text + b"\n" for text in texts)
    file, found, start = FollowedFile(path), [], 0
    for cut in sorted(min(cut, len(content)) for cut in [*cuts, len(content)]):
        with path.open("ab") as grown:
            grown.write(content[start:cut])
        start = cut
        found += [text for text in file.new_lines() if text is not None]
    assert found == texts


def test_what_is_no_object_of_a_log_is_counted_and_left_out(log: Path) -> None:
    with log.open("ab") as file:
        file.write(b'{"iteration": 35, "lm_l\n[1]\n\xff\n{"iteration": 1, "lm_loss": "low"}\n' + b"[" * 9999 + b"\n")
    run = followed(log)
    assert run.unusable_lines == 5 and list(run.history.losses()) == [10, 20, 30]
    assert "5 unreadable lines" in status(run)
    log.write_text("iteration 1/ 2 | lm loss: 7.0 |\n")  # the run's output instead of its --log-jsonl
    assert status(followed(log)) == "run: nothing logged yet, 1 unreadable line"


def test_control_characters_do_not_reach_the_terminal(log: Path) -> None:
    append(log, {"iteration": 30, "validation_loss": 1.0, "validation_set": "\x1b]0;title\x07\u202e"})()  # type: ignore[dict-item]
    run = followed(log, "run\x1b[2J\r\n")
    text = frame([run], ITERATION, PLAIN, now=0.0)
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
    assert "run?[2J??: iteration 30" in text
    assert printable("a\u2028b\x9bc") == "a?b?c"


def test_away_from_a_terminal_a_line_is_printed_when_a_log_has_grown_until_the_last_iteration(log: Path) -> None:
    output = io.StringIO()
    times = Times(lambda: None, append(log, line(40, 5.0), line(50, 4.0)), append(log, line(90, 3.0)))
    follow([FollowedRun(log, "run")], ITERATION, output, times.pause, lambda: 0.0)
    found = output.getvalue().splitlines()
    assert [text.split(",")[0] for text in found] == [f"run: iteration {count} of 90" for count in (30, 50, 90)]


def test_away_from_a_terminal_a_silence_is_told_once(log: Path) -> None:
    output = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        follow([FollowedRun(log, "run")], ITERATION, output, Times(lambda: None, lambda: None).pause, lambda: 1e11)
    assert output.getvalue().count("WARNING: the log has not grown") == 1


def test_two_runs_of_one_name_are_warned_about_apart(log: Path) -> None:
    output = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        follow([FollowedRun(log, "run"), FollowedRun(log, "run")], ITERATION, output, Times(lambda: None).pause, lambda: 1e11)
    assert output.getvalue().count("WARNING: the log has not grown") == 2


def test_a_terminal_without_control_sequences_gets_lines(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    monkeypatch.setenv("TERM", "dumb")
    append(log, line(90, 5.0))()
    output = Terminal()
    follow([FollowedRun(log, "run")], ITERATION, output, Times().pause, lambda: 0.0)
    assert "\x1b" not in output.getvalue() and output.getvalue().startswith("run: iteration 90 of 90")


def test_a_name_that_the_encoding_of_the_output_lacks_is_printed_with_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["tool"])
    run_command(argparse.ArgumentParser(), lambda _: print("caf\xe9 \udcff"))
    assert output.getvalue() == b"caf\\xe9 \\udcff\n"


def test_on_a_terminal_every_look_is_a_whole_frame(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TERM", raising=False)
    output = Terminal()
    path = tmp_path / "log.jsonl"
    times = Times(append(path, line(10, 7.0)), append(path, line(90, 5.0)))
    follow([FollowedRun(path, "run")], ITERATION, output, times.pause, lambda: 0.0)
    first, second, third = output.getvalue().split("\x1b[H\x1b[2J")[1:]
    assert "no such file yet" in first and "iteration 10 of 90" in second and "iteration 90 of 90" in third


@pytest.mark.parametrize(("variables", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], has_colour: bool) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert screen_of(Terminal()).has_colour == has_colour
    assert not screen_of(io.StringIO()).has_colour


def test_the_size_of_the_terminal_is_honoured(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    for columns, rows in ((60, 16), (132, 20)):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(rows))
        lines = frame([followed(log)], ITERATION, screen_of(io.StringIO()), now=0.0).splitlines()
        assert len(lines) < rows and max(map(len, lines)) == columns - 1


def test_a_terminal_without_braille_gets_stars(log: Path) -> None:
    text = frame([followed(log)], ITERATION, Screen(80, 24, has_colour=False, has_unicode=False), now=0.0)
    assert text.isascii() and "*" in text


@pytest.mark.parametrize(
    ("variables", "is_ascii"),
    [({"LANG": "C"}, True), ({"LANG": "C.UTF-8", "LC_ALL": "C"}, True), ({}, False)],
)
def test_a_locale_without_utf_8_gets_stars(log: Path, variables: dict[str, str], is_ascii: bool) -> None:
    command = [sys.executable, "tools/watch_run.py", "--once", "--log-jsonl", str(log)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, check=True)
    assert done.stdout.isascii() == is_ascii and (b"*" in done.stdout) == is_ascii


def test_once_prints_a_frame_and_ends(log: Path, tmp_path: Path) -> None:
    done = run_tool("watch_run", "--once", "--log-jsonl", log, tmp_path / "none.jsonl", "--names", "a", "b")
    assert done.returncode == 0 and "1 a: iteration 30 of 90" in done.stdout and "2 b: no such file yet" in done.stdout, done.stderr
    done = run_tool("watch_run", "--once", "--log-jsonl", log, "--x-axis", "tokens")
    assert done.returncode == 2 and "lacks consumed_tokens" in done.stderr
    os.mkfifo(tmp_path / "pipe")
    done = run_tool("watch_run", "--log-jsonl", tmp_path / "pipe")
    assert done.returncode == 2 and "it is a pipe, not a regular file" in done.stderr


def test_a_duration_leaves_out_leading_units_that_are_zero() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3600, 93784)] == ["0s", "1m 0s", "1h 0m 0s", "1d 2h 3m 4s"]
