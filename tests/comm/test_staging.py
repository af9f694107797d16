from __future__ import annotations

import torch
from harness.fake_streams.machine import Machine

from megatron_zpp.comm.staging import Staging


def test_a_buffer_given_back_is_handed_out_again_and_nothing_new_is_allocated() -> None:
    staging = Staging(torch.device("cpu"))
    first = staging.take(48)
    place = first.data_ptr()
    staging.give(first)
    assert staging.take(48).data_ptr() == place
    assert staging.allocated_bytes == 48


def test_two_takers_never_share_a_buffer() -> None:
    staging = Staging(torch.device("cpu"))
    buffers = [staging.take(32) for _ in range(4)]
    assert len({buffer.data_ptr() for buffer in buffers}) == 4
    for buffer in buffers:
        staging.give(buffer)
    again = [staging.take(32) for _ in range(4)]
    assert {buffer.data_ptr() for buffer in again} == {buffer.data_ptr() for buffer in buffers}


def test_a_buffer_has_the_size_asked_for() -> None:
    staging = Staging(torch.device("cpu"))
    staging.give(staging.take(64))
    assert (staging.take(16).numel(), staging.take(64).numel()) == (16, 64)
    assert staging.allocated_bytes == 80


def test_cleared_buffers_are_let_go_and_no_longer_counted() -> None:
    staging = Staging(torch.device("cpu"))
    kept, returned = staging.take(64), staging.take(128)
    staging.give(returned)
    staging.clear()
    assert staging.allocated_bytes == 64
    assert staging.take(128) is not returned and staging.allocated_bytes == 64 + 128 and kept.numel() == 64


def test_a_stream_takes_its_own_buffers_again_and_of_these_the_one_given_back_first() -> None:
    machine = Machine()
    staging = Staging(torch.device("cpu"), machine)
    lane = machine.make()
    with machine.entered(lane):
        of_lane = [staging.take(32) for _ in range(2)]
    of_computation = staging.take(32)
    for buffer in (*of_lane, of_computation):
        staging.give(buffer)
    assert staging.take(32) is of_computation
    with machine.entered(lane):
        assert staging.take(32) is of_lane[0]
