import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from harness.tool import run_tool, write_json_lines
from hypothesis import given
from hypothesis import strategies as st
from plot_run import Look, draw, running_means
from run_logs.history import AXES, read_histories, read_history, run_names

from megatron_zpp.system.user_error import UserError

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def training(iteration: int, loss: float, inter_node_bytes: int = 3_000_000) -> dict[str, float]:
    traffic = {"inter_node_bytes": inter_node_bytes, "intra_node_bytes": 2 * inter_node_bytes}
    return {"iteration": iteration, "lm_loss": loss, "learning_rate": loss / 1000, "grad_norm": 1.0, **traffic}


def validation(iteration: int, loss: float) -> dict[str, float]:
    return {"iteration": iteration, "validation_loss": loss}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_json_lines(tmp_path / "log.jsonl", [training(10, 7.0), training(20, 6.0), validation(20, 6.5), training(30, 5.5)])


def points(axes: object) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]  # type: ignore[attr-defined]


def test_the_three_plots_hold_the_logged_values(log: Path) -> None:
    loss, rate, traffic = draw([read_history(log, "one")], Look()).axes
    assert points(loss) == [([10, 20, 30], [7.0, 6.0, 5.5]), ([20], [6.5])]
    assert points(rate) == [([10, 20, 30], [0.007, 0.006, 0.0055])]
    assert points(traffic) == [([10, 20, 30], [3.0, 3.0, 3.0]), ([10, 20, 30], [6.0, 6.0, 6.0])]


def test_the_legend_has_a_dot_only_for_a_line_that_has_dots(log: Path, tmp_path: Path) -> None:
    lone = write_json_lines(tmp_path / "lone.jsonl", [training(10, 7.0)])
    for path, training_mark in ((log, ""), (lone, "o")):
        loss, *_ = draw([read_history(path, "one")], Look()).axes
        marks = {line.get_label(): line.get_marker() for line in loss.get_legend().get_lines()}
        assert marks["training"] == training_mark and marks.get("validation", "o") == "o"


def test_several_runs_share_the_plots_each_in_its_own_color_and_under_its_own_name(log: Path, tmp_path: Path) -> None:
    other = write_json_lines(tmp_path / "other.jsonl", [training(10, 8.0), validation(10, 8.5)])
    loss, rate, traffic = draw([read_history(log, "one"), read_history(other, "two")], Look()).axes
    assert [line.get_color() for line in loss.get_lines()] == ["C0", "C0", "C1", "C1"]
    assert [text.get_text() for text in rate.get_legend().get_texts()] == ["one", "two"]
    assert len(traffic.get_lines()) == 4


def test_a_run_of_one_rank_that_moves_no_bytes_is_drawn(tmp_path: Path) -> None:
    log = write_json_lines(tmp_path / "log.jsonl", [training(1, math.nan, inter_node_bytes=0)])
    *_, traffic = draw([read_history(log, "one")], Look()).axes
    assert traffic.get_ylim() == (0, 1)


def test_a_line_that_a_killed_run_left_unfinished_is_named_and_left_out(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = read_history(log, "one").losses()
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], '{"iteration": 25, "lm_l', *lines[2:]]))
    assert read_history(log, "one").losses() == whole
    assert "line 3: unfinished" in capsys.readouterr().err


def test_the_picture_is_a_png_of_1500_x_1200_pixels(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "run.png"
    done = run_tool("plot_run", "--log-jsonl", log, "--output", output)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    head = output.read_bytes()[:24]
    assert head[:8] == PNG_SIGNATURE
    assert struct.unpack(">II", head[16:24]) == (1500, 1200)


def test_the_same_run_is_drawn_over_tokens_seconds_and_bytes(tmp_path: Path) -> None:
    logged = {"interval_iterations": 10, "elapsed_ms_per_iteration": 500.0, "inter_node_bytes_per_iteration": 1e6}
    records = [training(n, 7.0 - n / 10) | logged | {"consumed_tokens": 100 * n} for n in (10, 20)]
    log = write_json_lines(tmp_path / "log.jsonl", [records[0], validation(15, 6.0), records[1]])
    for axis, lines, validated in (("tokens", [1000, 2000], 1500), ("seconds", [5, 10], 7.5), ("bytes", [1e7, 2e7], 1.5e7)):
        loss, rate, traffic = draw([read_history(log, "one")], Look(AXES[axis])).axes
        assert points(loss) == [(lines, [6.0, 5.0]), ([validated], [6.0])]
        assert all(xs == lines for axes in (rate, traffic) for xs, _ in points(axes))


def test_an_axis_that_the_log_does_not_have_is_refused_with_the_key_it_lacks(log: Path) -> None:
    for axis, key in (("tokens", "consumed_tokens"), ("seconds", "elapsed_ms_per_iteration"), ("bytes", "inter_node_bytes_per_iteration")):
        done = run_tool("plot_run", "--log-jsonl", log, "--output", log.with_suffix(".png"), "--x-axis", axis)
        assert done.returncode == 2 and f"lacks {key}" in done.stderr


def test_a_run_on_one_node_has_no_axis_of_bytes(tmp_path: Path) -> None:
    nothing = {"interval_iterations": 1, "inter_node_bytes_per_iteration": 0}
    log = write_json_lines(tmp_path / "log.jsonl", [training(1, 7.0) | nothing])
    with pytest.raises(UserError, match="one has no bytes into one node"):
        draw([read_history(log, "one")], Look(AXES["bytes"]))


def test_a_smoothed_loss_is_drawn_over_the_logged_one_and_says_so(log: Path) -> None:
    loss, *_ = draw([read_history(log, "one")], Look(smoothed_lines=2)).axes
    assert [ys for _, ys in points(loss)[:2]] == [[7.0, 6.0, 5.5], [7.0, 6.5, 5.75]]
    assert "mean of 2 lines" in loss.get_legend().get_texts()[0].get_text()
    assert running_means([1.0, 2.0, 6.0], 3) == [1.0, 1.5, 3.0]


@given(values=st.lists(st.sampled_from([3.0, 2.5, 1e30, math.nan, math.inf]), max_size=20), count=st.integers(1, 7))
def test_a_smoothed_loss_is_the_mean_of_its_window_whatever_was_before(values: list[float], count: int) -> None:
    windows = [list(filter(math.isfinite, values[max(0, end - count) : end])) for end in range(1, len(values) + 1)]
    means = [math.fsum(window) / max(1, len(window)) for window in windows]
    expected = [mean if math.isfinite(value) else math.nan for value, mean in zip(values, means, strict=True)]
    assert running_means(values, count) == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_losses_that_are_not_finite_leave_gaps_in_the_picture(tmp_path: Path) -> None:
    losses = [math.nan, 7.0, math.inf, 6.0, -math.inf]
    log = write_json_lines(tmp_path / "log.jsonl", [training(10 * n, loss) for n, loss in enumerate(losses, 1)])
    figure = draw([read_history(log, "one")], Look(smoothed_lines=2))
    figure.savefig(tmp_path / "run.png")
    low, high = figure.axes[0].get_ylim()
    assert 5.5 < low < 6.0 and 7.0 < high < 7.5
    assert figure.axes[0].get_lines()[0].get_markevery() == [1, 3]  # no stroke leads to these points


def test_scales_are_logarithmic_only_where_that_was_asked_for(log: Path) -> None:
    for scales in ((), ("x",), ("y",), ("x", "y")):
        loss, *_ = draw([read_history(log, "one")], Look(log_scales=scales)).axes
        assert (loss.get_xscale() == "log", loss.get_yscale() == "log") == ("x" in scales, "y" in scales)


def test_each_validation_set_is_a_curve_of_its_own(tmp_path: Path) -> None:
    sets = [validation(10, loss) | {"validation_set": name} for name, loss in (("books", 6.0), ("code", 5.0))]
    log = write_json_lines(tmp_path / "log.jsonl", [training(10, 7.0), *sets])
    loss, *_ = draw([read_history(log, "one")], Look()).axes
    assert points(loss)[1:] == [([10], [6.0]), ([10], [5.0])]


def test_an_svg_has_the_names_that_were_given(log: Path, tmp_path: Path) -> None:
    other = write_json_lines(tmp_path / "other.jsonl", [training(10, 8.0)])
    output = tmp_path / "run.svg"
    done = run_tool("plot_run", "--log-jsonl", log, other, "--names", "ZeRO-3", "lean", "--output", output)
    assert done.returncode == 0 and done.stdout == f"{output}: ZeRO-3, lean\n", done.stderr
    assert "</svg>" in output.read_text() and "<!-- lean -->" in output.read_text()


def test_a_legend_has_names_as_they_are(tmp_path: Path) -> None:
    log = write_json_lines(tmp_path / "log.jsonl", [training(10, 7.0), validation(10, 6.0) | {"validation_set": "$x_\x1b"}])
    figure = draw([read_history(log, "_one"), read_history(log, "$_$^")], Look())
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == [f"{name}: {curve}" for name in (" _one", r"\$_\$^") for curve in ("training", r"validation \$x_?")]
    figure.savefig(tmp_path / "run.svg")


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda parts: "/".join(parts) + ".jsonl")


@given(paths=st.lists(names, min_size=1, max_size=5, unique=True))
def test_different_files_get_different_names_which_end_their_paths(paths: Sequence[str]) -> None:
    short = run_names(paths, None)
    assert len(set(short)) == len(paths)
    assert all(path.removesuffix(".jsonl").endswith(name.removesuffix(".jsonl")) for path, name in zip(paths, short, strict=True))


@pytest.mark.parametrize("path", [".", "/", ".."])
def test_a_folder_is_refused_as_such(path: str) -> None:
    with pytest.raises(UserError, match="cannot be read .Is a directory"):
        read_histories([path], None)


@pytest.mark.parametrize(
    ("content", "output", "message"),
    [
        (None, "run.png", "log.jsonl cannot be read (No such file"),
        ("[" * 100_000, "run.png", "line 1 is nested more than 64 levels deep; give a file that --log-jsonl"),
        ('{"iteration": 1, "lm_loss": "x"}', "run.png", 'line 1: lm_loss must be a number, not "x"'),
        ('{"iteration": 1, "lm_loss": 1' + "0" * 400 + "}", "run.png", "line 1: lm_loss must be a number, not 1000"),
        ('{"iteration": 1, "lm_loss": 1, "inter_node_bytes": Infinity}', "run.png", "inter_node_bytes must be a finite number, not Inf"),
        ('{"iteration": 1.5, "lm_loss": 1}', "run.png", "line 1: iteration must be a whole number from 0"),
        ("", "run.png", "holds no training iteration"),
        (json.dumps(validation(1, 2.0)), "run.png", "holds no training iteration"),
        ("[1]", "run.png", "line 1 must be a JSON object, not [1]"),
        (json.dumps(training(1, 2.0)), "run.pdf", "run.pdf is neither a PNG nor an SVG file"),
    ],
)
def test_unusable_requests_are_refused(tmp_path: Path, content: str | None, output: str, message: str) -> None:
    log = tmp_path / "log.jsonl"
    if content is not None:
        log.write_text(content)
    done = run_tool("plot_run", "--log-jsonl", log, "--output", tmp_path / output)
    assert done.returncode == 2
    assert done.stderr.startswith("plot_run.py: error: ")
    assert message in done.stderr
    assert not (tmp_path / output).exists()


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("tool", ["plot_run", "compare_runs"])
@pytest.mark.parametrize(
    ("make", "finding"),
    [
        (os.mkfifo, "it is a pipe, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
        (make_large, "line 1 has more than 16777216 bytes"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
    ],
)
def test_what_is_not_a_log_is_refused_in_one_sentence(tmp_path: Path, tool: str, make: Callable[[Path], object], finding: str) -> None:
    make(tmp_path / "log.jsonl")
    output = ["--output", tmp_path / "run.png"] if tool == "plot_run" else []
    done = run_tool(tool, "--log-jsonl", tmp_path / "log.jsonl", *output)
    assert done.returncode == 2 and finding in done.stderr and len(done.stderr.splitlines()) == 1
