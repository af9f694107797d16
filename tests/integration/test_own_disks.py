"""Nodes with a network and a disk of their own: killed at many moments they lose no step that was saved; other nodes go on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.network_nodes import found_by

KILLS = 20


@pytest.mark.long
def test_nodes_with_disks_of_their_own_go_on_after_kills_in_another_order_and_as_three_or_one(tmp_path: Path) -> None:
    found = found_by("harness.own_disks", tmp_path, KILLS, limit_seconds=1800)
    assert found["unbroken"] == found["after kills"] == [0] * 4
    assert all(-9 in codes for codes in found["killed"])
    assert found["differing"] == [] and found["iterations"]
    assert found["repeated"] <= 3  # the step that was not saved yet, and what another had been ahead
    assert found["after lost disks"] == [0] * 4 and found["one of two with copies"] == [0, 0]
    assert found["differing after lost disks"] == [] and found["iterations after lost disks"]
    (same, same_bytes, no_line), (swapped, swapped_bytes, line), (three, *_) = (found[key] for key in ("same", "swapped", "three"))
    assert (same, swapped, three) == ([0] * 4, [0] * 4, [0] * 6)
    assert no_line == "" and "come from the disks of other nodes" in line
    assert swapped_bytes - same_bytes > 0.9 * found["files"]  # the first node gets all that its ranks need from the other one
    codes, text = found["one of two"]
    assert codes == [2, 2] and "is not whole: no node has rank_00002.safetensors, rank_00003.safetensors" in text
    assert found["one of both"] == [0, 0]
    assert found["losses ab"] == found["losses ba"]
    assert [loss for loss, _ in found["losses abe"]] == pytest.approx([loss for loss, _ in found["losses ab"]], rel=1e-5)
