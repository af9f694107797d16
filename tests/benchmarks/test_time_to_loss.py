"""Tests the study of time to loss (benchmarks/time_to_loss.py): its settings, its samples, and what it makes of curves and seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from harness.places import ROOT

from benchmarks import time_to_loss
from benchmarks.loss_study.text import Text
from benchmarks.slow_links.batches import text_batches
from benchmarks.slow_links.configurations import ALL, LEAN, ZERO3, Workload
from benchmarks.slow_links.program import MISTAKE_EXIT_CODE
from benchmarks.time_study.analysis import Findings, loss_at, step_with
from benchmarks.time_study.record import Curve, Record
from benchmarks.time_study.report import loss_by_tokens, minutes_to_loss, step_seconds, whole_runs
from benchmarks.time_study.settings import MEANS, SETTINGS, SMOKE_MODEL, WARMUP_STEPS
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from testbed import sandbox
from testbed.rates import UNLIMITED, Rate

pytestmark = pytest.mark.pure

WORLD = Workload(2, 1, SMOKE_MODEL, micro_batch_size=4)
TEN, H16, LARGE = Rate.parse("10mbit"), "islands, H = 16", f"{LEAN}, 8 x the batch"
ORIGIN = {"command": "none", "machine": {"processor": "any"}, "versions": {}, "date": "2026-11-28"}
SUBJECT = {"nodes": 2, "ranks_per_node": 1, "model": SMOKE_MODEL, "samples_per_rank": 4}


def config_of(name: str, learning_rate: float = 1e-3) -> Config:
    return resolve(parse_flags(SETTINGS[name].training_flags(WORLD, learning_rate)), 2, 1)


@pytest.mark.parametrize("name", SETTINGS)
def test_all_settings_train_the_same_model_for_as_many_steps_before_the_rate_is_constant(name: str) -> None:
    config, other = config_of(name), config_of(ZERO3)
    assert config.model == other.model
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.lr_warmup_iters, optimizer.lr_decay_style) == (1e-3, WARMUP_STEPS, "constant")


def test_the_settings_are_what_their_names_say() -> None:
    assert config_of(H16).diloco.diloco_sync_period == 16 and config_of(H16).diloco.diloco_start_iteration == WARMUP_STEPS
    assert config_of(LEAN).zero.zeropp == "lean" and config_of(ALL).zero.zeropp == "paper" and config_of(ZERO3).zero.zeropp is None
    assert config_of(LARGE).training.global_batch_size == 8 * config_of(LEAN).training.global_batch_size
    means, outer = SETTINGS[H16].timed(WORLD)
    starts = [resolve(parse_flags(timed.flags), 2, 1).diloco.diloco_start_iteration for timed in (means, outer)]
    assert (means.name, means.period, outer.name, outer.period) == (MEANS, 1, H16, 16) and starts[0] > 100_000 and starts[1] == 0


def test_batches_of_all_sizes_and_ranks_hold_the_same_samples_after_as_many_tokens() -> None:
    text = Text(bytes(range(256)) * 40, length=16, held_out=8)
    batches = partial(text_batches, text, 2)

    def samples(name: str, steps: int) -> torch.Tensor:
        config, count = config_of(name), steps * SETTINGS[name].batch
        of_ranks = [[batch.tokens for batch in islice(batches(config, [rank]), count)] for rank in range(2)]
        return torch.stack([torch.cat(of_rank) for of_rank in zip(*of_ranks, strict=True)])

    assert torch.equal(samples(LARGE, 1), samples(LEAN, 8)) and len(samples(LEAN, 8).unique(dim=0)) == 8
    both = [batch.tokens for batch in islice(batches(config_of(LEAN), [0, 1]), 2)]
    assert torch.equal(torch.cat(both), samples(LEAN, 1)[0])


def record_of(folder: Path) -> Record:
    """Lean ends at 2.0 after 32 steps, ZeRO-3 at 2.125; islands have 2.0 after 48 of 64. At 10 mbit a step of lean takes 10 s."""
    record = Record(folder / "record.json", SUBJECT, ORIGIN)
    for name, rate, steps, losses in (
        (LEAN, 1e-3, [0, 16, 32], [4.0, 3.0, 2.0]),
        (LEAN, 2e-3, [0, 16, 32], [4.0, 2.5, 2.25]),
        (H16, 1e-3, [0, 32, 64], [4.0, 2.5, 1.5]),
        (ZERO3, 1e-3, [0, 16, 32], [4.0, 3.0, 2.125]),
    ):
        record.add_curve(Curve(name, rate, "unlimited", steps, losses, [float(step) for step in steps]))
    for rate_of_link, seconds in ((UNLIMITED, (1.0, 1.0, 1.25, 1.0)), (TEN, (80.0, 10.0, 10.5, 1.5))):
        for name, one in zip((ZERO3, LEAN, MEANS, H16), seconds, strict=True):
            record.add_seconds(rate_of_link, name, one)
    record.add_curve(Curve(LEAN, 1e-3, "10mbit", [0, 16, 32], [4.0, 3.0, 2.0], [0.0, 165.0, 330.0]))
    return record


def test_islands_take_the_time_of_means_until_outer_steps_begin(tmp_path: Path) -> None:
    found = Findings(record_of(tmp_path))
    assert found.seconds(SETTINGS[H16], TEN, 10) == 105.0
    assert found.seconds(SETTINGS[H16], TEN, 48) == WARMUP_STEPS * 10.5 + (48 - WARMUP_STEPS) * 1.5
    assert found.seconds(SETTINGS[LEAN], TEN, 32) == 320.0
    assert found.points(SETTINGS[LEAN], TEN) == [(160.0, 3.0), (320.0, 2.0)]


def test_the_tables_are_those_of_each_settings_best_rate(tmp_path: Path) -> None:
    found = Findings(record_of(tmp_path))
    assert found.target == 2.125 and [str(rate) for rate in found.rates] == ["unlimited", "10mbit"]
    assert minutes_to_loss(found).splitlines()[2:] == [
        "| ZeRO-3 | 0.00M | 0.5 | 42.7 |",
        "| lean | 0.00M | 0.5 | 5.0 |",
        f"| {H16} | 0.01M | 0.8 | 3.5 |",
    ]
    assert loss_by_tokens(found).splitlines()[2:] == [
        "| ZeRO-3 | 0.001 | - | 3.000 | 2.125 | - |",
        "| lean | 0.001 | - | 3.000 | 2.000 | - |",
        f"| {H16} | 0.001 | - | - | 2.500 | 1.500 |",
    ]
    assert step_seconds(found).splitlines()[-1] == f"| {H16} | 1.00 | 1.50 |"
    found.record.add_curve(Curve(H16, 1e-3, "10mbit", [0, 32, 64], [4.0, 2.5, 1.5], [0.0, 180.0, 240.0]))
    header, _, *rows = whole_runs(found).splitlines()
    assert header.endswith(" | minutes to a loss of 2.000 | loss |")
    assert rows == ["| lean | 10 Mbit/s | 32 | 5.5 | 5.3 | 5.5 | 2.000 |", f"| {H16} | 10 Mbit/s | 64 | 4.0 | 4.0 | 3.5 | 1.500 |"]


def test_an_incomplete_record_has_tables_of_what_is_there(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    for of_rate in record.timed.values():
        del of_rate[MEANS]
    del record.timed["10mbit"][ZERO3]
    assert [line.split(" | ")[0] for line in minutes_to_loss(Findings(record)).splitlines()[2:]] == ["| lean"]
    assert step_seconds(Findings(record)).splitlines()[2] == "| ZeRO-3 | 1.00 | - |"
    record.timed.clear()
    assert len(step_seconds(Findings(record)).splitlines()) == len(minutes_to_loss(Findings(record)).splitlines()) == 2
    assert len(whole_runs(Findings(record)).splitlines()) == 2


def test_points_must_fit_steps_and_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_to_loss, "enter_own_network", lambda argv: None)
    words = ["losses", "--settings", LEAN, "--output", str(tmp_path / "out.json"), "--tokens-per-point"]
    for points in ("1000", "4096000"):
        assert time_to_loss.main([*words, points]) == MISTAKE_EXIT_CODE
        assert f"--tokens-per-point {points} must be a multiple of 2048, the tokens of the largest step, and" in capsys.readouterr().err


def test_a_loss_is_had_where_the_line_between_evaluations_first_falls_to_it() -> None:
    curve = Curve(LEAN, 1e-3, "unlimited", [0, 10, 20, 30], [4.0, 3.0, 3.5, 2.0], [0.0] * 4)
    assert [step_with(curve, loss) for loss in (3.5, 3.0, 2.75, 2.0, 1.9)] == [5.0, 10.0, 25.0, 30.0, None]
    assert loss_at(curve, 20) == 3.5 and loss_at(curve, 15) is None


def test_a_record_goes_on_with_what_it_has_and_refuses_another_subject(tmp_path: Path) -> None:
    record_of(tmp_path)
    again = Record(tmp_path / "record.json", SUBJECT, ORIGIN)
    assert again.has_curve(LEAN, 2e-3, UNLIMITED, 32) and again.rounds(TEN, LEAN) == 1
    assert not again.has_curve(LEAN, 2e-3, UNLIMITED, 33) and not again.has_curve(LEAN, 2e-3, TEN, 32)
    assert again.rounds(Rate.parse("50mbit"), LEAN) == 0
    again.add_seconds(TEN, LEAN, 9.0)
    assert Record.stored(tmp_path / "record.json").step_seconds["10mbit"] == {ZERO3: 80.0, LEAN: 9.0, MEANS: 10.5, H16: 1.5}
    assert Record.stored(tmp_path / "record.json").curves == again.curves
    with pytest.raises(ValueError, match="another nodes; give another --output"):
        Record(tmp_path / "record.json", SUBJECT | {"nodes": 3}, ORIGIN)


def test_whole_runs_need_the_losses_of_their_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no curve of lean; measure its losses first"):
        Record(tmp_path / "record.json", SUBJECT, ORIGIN).best_curve(LEAN)


def test_without_a_part_all_are_measured_and_a_smoke_test_has_a_file_of_its_own() -> None:
    everything, smoke, report = (time_to_loss._parse(words) for words in ([], ["--smoke"], ["report"]))
    assert everything.parts == smoke.parts == list(time_to_loss.PARTS) and report.parts == ["report"]
    assert everything.settings == list(SETTINGS) and everything.output != smoke.output


def test_a_setting_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        time_to_loss.main(["losses", "--settings", "fastest"])
    assert "invalid choice: 'fastest'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        time_to_loss.main(["loss"])
    assert "loss is none of losses, seconds, whole, report" in capsys.readouterr().err


@pytest.mark.long
def test_the_program_measures_and_reports_and_a_whole_run_has_the_losses_of_one_without_a_limit(tmp_path: Path) -> None:
    try:
        sandbox.isolating_command()
    except sandbox.CannotIsolate as error:
        pytest.skip(str(error))
    words = [sys.executable, "-m", "benchmarks.time_to_loss", "--smoke", "--settings", LEAN, H16, "--output", str(tmp_path / "out.json")]
    finished = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert finished.returncode == 0, finished.stderr
    assert f"| {H16} | 200 Mbit/s | 32 |" in finished.stdout
    curves = [Curve(**curve) for curve in json.loads((tmp_path / "out.json").read_text())["curves"]]
    for whole in (curve for curve in curves if curve.rate == "200mbit"):
        free = next(one for one in curves if (one.setting, one.learning_rate) == (whole.setting, whole.learning_rate))
        assert whole.losses == free.losses and whole.losses[-1] < whole.losses[0]
