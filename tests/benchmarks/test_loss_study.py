"""Tests the study of loss (benchmarks/loss_parity.py): its settings, its runs, and the figures that it draws from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import tiers

from benchmarks import loss_parity
from benchmarks.loss_study import training
from benchmarks.loss_study.gaps import Interval, gaps_of
from benchmarks.loss_study.record import Record
from benchmarks.loss_study.report import draw, table
from benchmarks.loss_study.settings import (
    FIRST,
    GROUPS,
    HALF_RATE,
    ISLANDS_BY_RATE,
    PLAIN,
    RATES,
    SECOND,
    SETTINGS,
    Setting,
    make_codec_with_shared_signs,
    plain_of,
)
from benchmarks.loss_study.text import Text
from benchmarks.loss_study.training import Outcome, trained
from megatron_zpp.comm.backend import VirtualWorld
from megatron_zpp.comm.code import EXACT, Code, LinkCodes, Rotation
from megatron_zpp.comm.codec import SignKeys
from megatron_zpp.comm.codecs import CastCodec
from megatron_zpp.comm.gaussian_codec import GaussianCodec
from megatron_zpp.comm.lanes import ThreadLanes
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.sharding import choose_policy
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Policy

MOMENTS_AVERAGED = "islands, every 16 steps, moments averaged"
TEXT = Text(bytes(range(256)) * 40, length=8, held_out=8)
TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --attention-dropout 0 --hidden-dropout 0"


def row_of(name: str) -> Policy:
    setting = SETTINGS[name]
    config = resolve(parse_flags(f"{training.common_flags(30, 'narrow')} {setting.flags}".split()), 4, 2)
    return setting.change(choose_policy(config.zero))


def outcome(setting: str, seed: int, loss: float, exported: float = 1.0, nbytes: float = 300.0) -> Outcome:
    return Outcome(setting, seed, loss, exported, [], nbytes, 0.0)


@pytest.fixture
def tiny_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a model so small that they take no time."""
    monkeypatch.setitem(training.MODELS, "narrow", (TINY, training.MODELS["narrow"][1]))


# ---- Settings


def test_the_rows_are_those_of_the_presets_and_plain_stage_3() -> None:
    assert row_of("ZeRO-3") == POLICIES[3]
    assert row_of("paper") == ZEROPP
    lean = row_of("lean")
    assert lean.keeps_copy and lean.weight_codes.inter == Code.gaussian(3, rounds=1)
    assert row_of("lean, 1-bit differences") == replace(lean, weight_codes=replace(lean.weight_codes, inter=Code.gaussian(1, rounds=1)))


def test_every_change_of_a_row_changes_what_its_name_says_and_nothing_else() -> None:
    lean = row_of("lean")
    gradients = lean.gradient_codes
    two_rounds = replace(lean, gradient_codes=replace(gradients, inter=Code.gaussian(3, rounds=2)))
    assert gradients.inter.rounds == 1 and row_of("lean, two rounds for gradients") == two_rounds
    sdp4bit_like = row_of("4-bit absmax differences, 8/4-bit absmax gradients, rotated")
    assert sdp4bit_like.keeps_copy and sdp4bit_like.weight_codes == LinkCodes(Code(4))
    assert sdp4bit_like.gradient_codes == LinkCodes(Code(4, Rotation.HADAMARD), Code(8, Rotation.HADAMARD))
    assert row_of("lean, gradients in 4 bits").gradient_codes.inter == Code.gaussian(4, rounds=1)
    assert row_of("lean, 8/4-bit absmax gradients, not rotated").gradient_codes == LinkCodes(Code(4), Code(8))
    assert row_of("lean, gradients in 16 bits").gradient_codes.inter == EXACT
    assert row_of("lean, gradients in 16 bits").weight_codes == lean.weight_codes
    assert row_of("lean, weights in 16 bits").gradient_codes == gradients
    assert not row_of("lean, weights in 16 bits").keeps_copy


def test_with_shared_signs_all_senders_have_the_key_of_the_first() -> None:
    codec = make_codec_with_shared_signs(Code.gaussian(3, rounds=1), torch.bfloat16, 256).with_signs(SignKeys(7, (5, 7)))
    assert isinstance(codec, GaussianCodec) and codec.keys == SignKeys(5, (5, 5))
    assert make_codec_with_shared_signs(EXACT, torch.bfloat16, 256) == CastCodec(torch.bfloat16)


def test_names_are_unique_and_every_setting_has_a_plain_one_of_its_rate() -> None:
    settings = {setting for group in GROUPS.values() for setting in group}
    assert len(SETTINGS) == len(settings)
    assert {plain_of(setting).name for setting in (*FIRST, *SECOND)} == {"ZeRO-3"}
    assert {plain_of(setting).name for setting in HALF_RATE} == {"ZeRO-3, half the rate"}
    assert {plain_of(setting).name for setting in ISLANDS_BY_RATE} == {f"ZeRO-3{words}" for words in RATES.values()}


# ---- Text


def test_held_out_samples_are_not_in_the_training_part() -> None:
    content = bytes(10 * 8 * 8) + b"a" + b"b" * 64
    text = Text(content, length=8, held_out=8)
    tokens, labels = text.held_out()
    assert tokens.shape == (8, 8) and tokens[0, 0] == ord("a") and set(labels.flatten().tolist()) == {ord("b")}
    batches = [text.training_batch(1, step, 4) for step in range(50)]
    assert {int(value) for rows, labels in batches for value in (rows.max(), labels.max())} == {0}


def test_a_batch_depends_on_seed_and_step_alone_and_labels_follow_tokens() -> None:
    tokens, labels = TEXT.training_batch(3, 5, 4)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert torch.equal(tokens, TEXT.training_batch(3, 5, 4)[0])
    assert not torch.equal(tokens, TEXT.training_batch(3, 6, 4)[0]) and not torch.equal(tokens, TEXT.training_batch(4, 5, 4)[0])


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has 100 bytes, and 8 held-out samples of 8 need 650"):
        Text(bytes(100), length=8, held_out=8)


# ---- Runs


@pytest.mark.virtual
@pytest.mark.parametrize("name", ["ZeRO-3", "lean, signs shared by senders", "islands, every 16 steps, one step late", MOMENTS_AVERAGED])
def test_ranks_that_take_turns_train_as_ranks_that_run_at_once_with_threads_for_lanes(
    tiny_runs: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tiers.require("virtual")
    expected = trained(SETTINGS[name], 2, 10, TEXT, "narrow")
    monkeypatch.setattr(training, "InlineLanes", ThreadLanes)
    monkeypatch.setattr(training, "TurnWorld", VirtualWorld)
    assert replace(trained(SETTINGS[name], 2, 10, TEXT, "narrow"), cpu_seconds=0.0) == replace(expected, cpu_seconds=0.0)
    assert expected.training_losses[0] > expected.validation_loss


@pytest.mark.virtual
def test_moments_that_are_averaged_change_the_course_from_the_first_exchange_on(tiny_runs: None) -> None:
    tiers.require("virtual")
    own, others = (trained(SETTINGS[name], 2, 30, TEXT, "narrow") for name in (MOMENTS_AVERAGED, "islands, every 16 steps"))
    assert own.validation_loss != others.validation_loss
    assert own.inter_node_bytes == others.inter_node_bytes  # they cross beside the ledger


@pytest.mark.virtual
def test_plain_training_exports_the_weights_that_it_is_validated_with_up_to_their_rounding(tiny_runs: None) -> None:
    tiers.require("virtual")
    result = trained(PLAIN, 1, 12, TEXT, "narrow")
    # bf16 rounds weights and activations by up to 2^-9 each; the loss of 5.5 moves by far less than the 2^-9 of it that one rounding has
    assert result.exported_loss == pytest.approx(result.validation_loss, rel=2**-9)
    assert result.exported_loss != result.validation_loss


def test_the_perturbation_of_a_repeated_run_is_far_below_what_bf16_resolves() -> None:
    assert [0 < setting.perturbation < 2**-8 * 2**-8 for setting in FIRST if setting.name.startswith("ZeRO-3 again")] == [True]


# ---- Figures


def test_the_interval_is_that_of_student() -> None:
    interval = Interval.of([1.0, 2.0, 3.0, 4.0])  # standard deviation 1.291, t 3.182 for 3 degrees of freedom
    assert interval.mean == 2.5 and interval.half == pytest.approx(3.182 * 1.290994 / 2, rel=1e-5)
    assert math.isnan(Interval.of([1.0]).half)
    with pytest.raises(ValueError, match="at least one"):
        Interval.of([])


def test_gaps_pair_runs_of_one_seed_and_one_rate() -> None:
    outcomes = [
        outcome("ZeRO-3", 1, 2.0),
        outcome("ZeRO-3", 2, 4.0),
        outcome("ZeRO-3, half the rate", 1, 1.0),
        outcome("lean", 1, 2.02, exported=1.01, nbytes=30.0),
        outcome("lean", 2, 4.0),
        outcome("lean", 3, 9.0),
        outcome("lean, half the rate", 1, 1.5),
    ]
    gaps = {gap.setting.name: gap for gap in gaps_of(outcomes)}
    assert gaps["lean"].percents == (pytest.approx(1.0), 0.0) and gaps["lean"].exported == (pytest.approx(1.0), 0.0)
    assert gaps["lean"].share == pytest.approx(0.1) and gaps["lean"].mean_loss == pytest.approx(3.01)
    assert gaps["lean, half the rate"].percents == (pytest.approx(50.0),)
    assert "paper" not in gaps


def test_a_table_and_a_picture_come_from_stored_outcomes(tmp_path: Path) -> None:
    gaps = list(gaps_of([outcome("ZeRO-3", 1, 2.0), outcome("ZeRO-3", 2, 2.0), outcome("lean", 1, 2.0), outcome("lean", 2, 2.02)]))
    assert "| lean | 3.000 | 2.0100 | +0.50 ± 6.35 | +0.00 ± 0.00 | 2 |" in table(gaps)
    assert "| ZeRO-3 | 3.000 | 2.0000 | - | - | 2 |" in table(gaps)
    draw(gaps, tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").stat().st_size > 1000


def made(name: str) -> dict[str, object]:
    return {"command": f"python -m benchmarks.{name}", "machine": {"processor": "any"}, "date": "2026-01-01"}


def test_outcomes_are_kept_and_those_of_other_flags_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    Record(path, {"flags": "a"}, made("first")).add(outcome("lean", 1, 2.0))
    again = Record(path, {"flags": "a"}, made("second"))
    assert again.has("lean", 1) and not again.has("lean", 2)
    assert json.loads(path.read_text())["outcomes"][0]["setting"] == "lean"
    again.add(outcome("lean", 2, 2.0))
    assert json.loads(path.read_text())["command"] == ["python -m benchmarks.first", "python -m benchmarks.second"]
    with pytest.raises(ValueError, match="holds runs with another flags; give another --output or remove it"):
        Record(path, {"flags": "b"}, made("third"))


def folder_with_text(folder: Path) -> Path:
    """A work folder that holds a text, so that the program makes none."""
    samples = 10 * training.HELD_OUT_SAMPLES + 1
    (folder / "text.bin").write_bytes(bytes(range(256)) * (samples * training.SEQ_LENGTH // 256 + 1))
    return folder


def test_the_program_trains_seed_by_seed_what_is_missing_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[tuple[int, str]] = []

    def recorded(setting: Setting, seed: int, train_iters: int, text: Text, model: str) -> Outcome:
        assert model == "narrow"
        runs.append((seed, setting.name))
        return outcome(setting.name, seed, 2.0)

    monkeypatch.setattr(loss_parity, "trained", recorded)
    words = ["--work-dir", str(folder_with_text(tmp_path)), "--output", str(tmp_path / "study.json"), "--seeds", "1", "2", "--groups"]
    assert loss_parity.main([*words, "first"]) == 0
    assert runs == [(seed, setting.name) for seed in (1, 2) for setting in FIRST]
    runs.clear()
    assert loss_parity.main([*words, "first", "second"]) == 0
    assert runs == [(seed, setting.name) for seed in (1, 2) for setting in SECOND]
    runs.clear()
    assert loss_parity.main([*words[:-1], "--settings", "lean, half the rate", "ZeRO-3"]) == 0
    assert runs == [(1, "lean, half the rate"), (2, "lean, half the rate")]
    runs.clear()
    (tmp_path / "study.png").unlink()
    assert loss_parity.main([*words, "half-rate", "--report-only"]) == 0
    assert not runs and (tmp_path / "study.png").is_file()


def test_there_is_nothing_to_report_before_a_plain_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--work-dir", str(folder_with_text(tmp_path)), "--output", str(tmp_path / "study.json"), "--report-only"]
    assert loss_parity.main(words) == loss_parity.MISTAKE_EXIT_CODE
    assert "holds no plain run, which gaps are measured against; train ZeRO-3 at the same rate" in capsys.readouterr().err
