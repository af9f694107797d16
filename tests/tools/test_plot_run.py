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
from plot_run import distinct_names, draw, read_curves

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
    loss, rate, traffic = draw([read_curves(log, "one")]).axes
    assert points(loss) == [([10, 20, 30], [7.0, 6.0, 5.5]), ([20], [6.5])]
    assert points(rate) == [([10, 20, 30], [0.007, 0.006, 0.0055])]
    assert points(traffic) == [([10, 20, 30], [3.0, 3.0, 3.0]), ([10, 20, 30], [6.0, 6.0, 6.0])]


def test_several_runs_share_the_plots_each_in_its_own_color_and_under_its_own_name(log: Path, tmp_path: Path) -> None:
    other = write_json_lines(tmp_path / "other.jsonl", [training(10, 8.0), validation(10, 8.5)])
    loss, rate, traffic = draw([read_curves(log, "one"), read_curves(other, "two")]).axes
    assert [line.get_color() for line in loss.get_lines()] == ["C0", "C0", "C1", "C1"]
    assert [text.get_text() for text in rate.get_legend().get_texts()] == ["one", "two"]
    assert len(traffic.get_lines()) == 4


def test_a_run_of_one_rank_that_moves_no_bytes_is_drawn(tmp_path: Path) -> None:
    log = write_json_lines(tmp_path / "log.jsonl", [training(1, math.nan, inter_node_bytes=0)])
    *_, traffic = draw([read_curves(log, "one")]).axes
    assert traffic.get_ylim() == (0, 1)


def test_an_iteration_that_a_resumed_run_logged_again_counts_as_logged_last(tmp_path: Path) -> None:
    log = write_json_lines(tmp_path / "log.jsonl", [training(10, 7.0), training(20, 6.0), training(10, 7.5), training(15, 6.8)])
    assert list(read_curves(log, "one").training_loss.items()) == [(10, 7.5), (15, 6.8), (20, 6.0)]


def test_a_line_that_a_killed_run_left_unfinished_is_named_and_left_out(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = read_curves(log, "one")
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:2], '{"iteration": 25, "lm_l', *lines[2:]]))
    assert read_curves(log, "one") == whole
    assert "line 3: unfinished" in capsys.readouterr().err


def test_the_picture_is_a_png_of_1500_x_1200_pixels(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "run.png"
    done = run_tool("plot_run", "--log-jsonl", log, "--output", output)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    head = output.read_bytes()[:24]
    assert head[:8] == PNG_SIGNATURE
    assert struct.unpack(">II", head[16:24]) == (1500, 1200)


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda parts: "/".join(parts) + ".jsonl")


@given(paths=st.lists(names, min_size=1, max_size=5, unique=True))
def test_different_files_get_different_names_which_end_their_paths(paths: Sequence[str]) -> None:
    short = distinct_names(paths)
    assert len(set(short)) == len(paths)
    assert all(path.removesuffix(".jsonl").endswith(name.removesuffix(".jsonl")) for path, name in zip(paths, short, strict=True))


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
        (json.dumps(training(1, 2.0)), "run.pdf", "run.pdf is not a PNG file"),
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
        (make_large, "has more than 536870912 bytes"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
    ],
)
def test_what_is_not_a_log_is_refused_in_one_sentence(tmp_path: Path, tool: str, make: Callable[[Path], object], finding: str) -> None:
    make(tmp_path / "log.jsonl")
    output = ["--output", tmp_path / "run.png"] if tool == "plot_run" else []
    done = run_tool(tool, "--log-jsonl", tmp_path / "log.jsonl", *output)
    assert done.returncode == 2 and finding in done.stderr and len(done.stderr.splitlines()) == 1
