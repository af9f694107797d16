"""Tests the arithmetic of benchmarks/two_nodes.py; with --long, also the benchmark itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import closed_forms
from harness.interrupts import heed_interrupts
from harness.patience import PATIENCE_SECONDS, wait_until
from harness.places import ROOT
from harness.processes import children_of, is_alive, runs

from benchmarks.slow_links.analysis import Rated, analyse
from benchmarks.slow_links.configurations import ALL, DEEPSPEED, FSDP2, NAMES, SMOKE_MODEL, ZERO3, Workload
from benchmarks.slow_links.measurement import chosen_rates, smallest_hop, smallest_hop_of
from benchmarks.slow_links.record import Record
from testbed import sandbox
from testbed.rates import UNLIMITED, Rate

WORKLOAD = Workload(2, 2, SMOKE_MODEL)


def measured(seconds: float, nbytes: float) -> dict[str, Any]:
    return {"steps": 2, "seconds": seconds, "kernel_bytes": nbytes, "ledger_bytes": nbytes, "control_bytes": 0.0, "loss": 1.0, "hidden": {}}


def round_of(seconds: dict[str, float], nbytes: dict[str, float]) -> dict[str, Any]:
    return {name: measured(seconds.get(name, 1.0), nbytes.get(name, 12e6)) for name in NAMES}


@pytest.mark.parametrize(("text", "bits"), [("200mbit", 2e8), ("1.5gbit", 1.5e9), ("64KBIT", 6.4e4), ("unlimited", float("inf"))])
def test_a_rate_is_read_as_tc_writes_it(text: str, bits: float) -> None:
    assert Rate.parse(text).bits_per_second == bits
    assert Rate.parse(str(Rate.parse(text))) == Rate.parse(text)


@pytest.mark.parametrize("text", ["fast", "-3mbit", "mbit", "12", "nanmbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--rate {text}"):
        Rate.parse(text)


def test_a_unit_that_a_burst_would_carry_is_refused_with_the_remedy() -> None:
    assert smallest_hop(WORKLOAD) >= 10 * 70 * 1024
    tiny = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 500"
    with pytest.raises(ValueError, match="less than 10 bursts.*larger --hidden-size"):
        smallest_hop(Workload(2, 2, tiny))


def test_the_smallest_hop_is_the_integer_gradient_of_the_smallest_unit_that_matters() -> None:
    model = f"--num-layers {closed_forms.LAYERS} --hidden-size {closed_forms.HIDDEN} --num-attention-heads 4 --bf16 --vocab-size 100"
    model += f" --seq-length {closed_forms.POSITIONS} --make-vocab-size-divisible-by 8 --quantization-block-size {closed_forms.BLOCK}"
    embedding = closed_forms.units(is_tied=True)[0]
    assert smallest_hop_of(ALL, Workload(2, 2, model)) == 2 * closed_forms.payload_bytes(embedding, 4, 4, 2)


def test_a_record_goes_on_with_its_rounds_and_refuses_those_of_another_measurement(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    Record(path, {"nodes": 2}, starts_anew=False).add_round(UNLIMITED, round_of({}, {}))
    assert len(Record(path, {"nodes": 2}, starts_anew=False).rounds(UNLIMITED)) == 1
    assert Record(path, {"nodes": 4}, starts_anew=True).rates == []
    with pytest.raises(ValueError, match="nodes 2 there and 4 here"):
        Record(path, {"nodes": 4}, starts_anew=False)


def record_of(tmp_path: Path) -> Record:
    """Without limit every step takes 1 s. At 8 mbit, ZeRO-3 takes 5 s, ZeRO++ with a quarter of its bytes 2 s, FSDP2 20 s."""
    record = Record(tmp_path / "record.json", {}, starts_anew=True)
    record.add_round(UNLIMITED, round_of({}, {}))
    for factor in (1.0, 2.0, 4.0):  # a machine that is slower in some rounds
        record.add_round(Rate.parse("8mbit"), round_of({ZERO3: 5 * factor, ALL: 2 * factor, FSDP2: 20 * factor}, {ALL: 3e6}))
    return record


def limited(tmp_path: Path) -> Rated:
    return next(rated for rated in analyse(record_of(tmp_path), WORKLOAD) if rated.rate.is_limited)


def test_speedups_are_medians_of_ratios_within_rounds(tmp_path: Path) -> None:
    row = limited(tmp_path).rows[ALL]
    assert (row.over_zero3, row.over_fsdp2) == (2.5, 10.0)
    assert (row.seconds.least, row.seconds.median, row.seconds.most) == (2.0, 4.0, 8.0)
    assert row.tokens_per_second == 64 / 4.0


def test_what_bytes_alone_allow_follows_from_the_share_of_the_links(tmp_path: Path) -> None:
    rated = limited(tmp_path)
    assert rated.f == pytest.approx(0.9)  # 1 - 1 s / 10 s, the median at 8 mbit
    assert rated.rows[ALL].allowed == pytest.approx(1 / (0.1 + 0.9 / 4))
    assert rated.rows[ALL].reached == pytest.approx(2.5 * (0.1 + 0.9 / 4))
    assert rated.rows[FSDP2].allowed is None


def test_the_parts_of_the_gain_over_fsdp2_multiply_to_it(tmp_path: Path) -> None:
    gains = limited(tmp_path).gain_by_part(ALL)
    product = 1.0
    for gain in gains.values():
        product *= gain
    assert product == pytest.approx(10.0)
    spared_seconds = 2 * WORKLOAD.parameters * 3 / 4 / 1e6
    assert limited(tmp_path).fsdp2_3m_seconds == pytest.approx(40 - spared_seconds)


def test_without_gloos_extra_bytes_no_peer_is_faster_than_without_a_limit(tmp_path: Path) -> None:
    """DeepSpeed takes 1 s at both rates, less than the spared bytes would take at 8 mbit."""
    assert limited(tmp_path).ring_seconds[DEEPSPEED] == 1.0


def test_rates_are_chosen_after_the_step_without_limit_and_kept(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", {}, starts_anew=True)
    record.add_round(UNLIMITED, round_of({ZERO3: 0.5, FSDP2: 0.5}, {ZERO3: 50e6, FSDP2: 97.5e6}))
    assert list(map(str, chosen_rates(record))) == ["800mbit", "400mbit", "180mbit", "80mbit"]
    record.add_round(UNLIMITED, round_of({ZERO3: 5.0, FSDP2: 5.0}, {}))
    assert list(map(str, chosen_rates(record))) == ["800mbit", "400mbit", "180mbit", "80mbit"]


def test_what_is_missing_for_a_network_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(sandbox.CannotIsolate, match="tc not found; install"):
        sandbox.isolating_command()


def test_where_neither_root_nor_user_namespaces_are_there_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = subprocess.CompletedProcess([], 1, "", "Operation not permitted")
    monkeypatch.setattr(sandbox.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(sandbox.subprocess, "run", lambda *arguments, **options: refusal)
    with pytest.raises(sandbox.CannotIsolate, match="root.*unprivileged user namespace.*Operation not permitted"):
        sandbox.isolating_command()


def skip_without_namespaces() -> None:
    try:
        sandbox.isolating_command()
    except sandbox.CannotIsolate as error:
        pytest.skip(str(error))


def start_smoke(output: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "benchmarks.two_nodes", "--smoke", "--output", str(output)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)


@pytest.mark.long
def test_the_kernel_counts_what_the_ledger_counts(tmp_path: Path) -> None:
    skip_without_namespaces()
    process = start_smoke(tmp_path / "smoke")
    _, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert (tmp_path / "smoke.png").stat().st_size > 10_000 and "ZeRO++" in (tmp_path / "smoke.md").read_text()
    for rounds in json.loads((tmp_path / "smoke.json").read_text())["rates"].values():
        for name, result in rounds[0].items():
            if name != FSDP2:
                booked = result["ledger_bytes"] + result["control_bytes"]
                assert booked < result["kernel_bytes"] < 1.03 * booked  # TCP and IP headers, acknowledgements, the store's messages


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_no_rank_stays_behind(tmp_path: Path, number: signal.Signals) -> None:
    skip_without_namespaces()
    process = start_smoke(tmp_path / "smoke")
    wait_until(lambda: len(ranks_of(process.pid)) == 4, "there are not four ranks")
    ranks = ranks_of(process.pid)
    time.sleep(1.0)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode != 0 and len(ranks) == 4
    wait_until(lambda: not any(map(is_alive, ranks)), "a rank lives on")


def ranks_of(process_id: int) -> list[int]:
    return [child for child in children_of(process_id) if runs(child, "benchmarks.slow_links.worker")]
