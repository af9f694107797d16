"""A checkpoint that is written in the background while later steps go on, on streams of the model machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.small_engine import LEARNING_RATE, Job, Rank, train_world

from megatron_zpp.checkpoint import saver as saver_module
from megatron_zpp.checkpoint import snapshot
from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.manifest import CheckpointError
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.zero.pieces import Piece, owned_pieces

pytestmark = pytest.mark.virtual
JOB = Job(steps=5)


class Later:
    """Stands for the saver's threads: what they do, the rank's own thread does at a moment that the test chooses."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], object]] = []

    def make_thread(self, *, target: Callable[..., object], args: tuple[object, ...], **_: Any) -> Later:
        self._tasks.append(partial(target, *args))
        return self

    def start(self) -> None:
        """The thread gets no time yet."""

    def run(self) -> None:
        while self._tasks:
            self._tasks.pop(0)()


def train(gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch, *, waits_for_copy: bool = True) -> list[tuple[float, float]]:
    """Saves after each step. The copy is made, and the file written, when the backward of the next step has been enqueued."""
    later = Later()
    monkeypatch.setattr(saver_module, "threading", SimpleNamespace(Thread=later.make_thread, Event=threading.Event))
    monkeypatch.setattr(snapshot, "streams_of", lambda _: gpu.machine)
    rank = Rank(JOB, gpu.backend, lanes=gpu.lanes, streams=gpu.machine)
    saver = CheckpointSaver(folder, EngineState(rank.engine).share(with_moments=True), SaveOptions(in_background=True), lambda text: [text])
    history = []
    states: list[list[Piece]] = []
    for step in range(JOB.steps):
        loss = rank.accumulate(step)
        if waits_for_copy:
            later.run()
            saver.wait_for_copy()
        history.append((loss, rank.engine.step(LEARNING_RATE).grad_norm))
        later.run()
        states.append([replace(piece, values=piece.values.clone()) for piece in owned_pieces(rank.engine)])
        saver.save(EngineState(rank.engine).manifest(Progress(step + 1, 0, 0), {}, with_moments=True))
    later.run()
    saver.finish()
    rank.engine.close()
    for iteration, pieces in enumerate(states, start=1):
        check_holds(iteration_folder(folder, iteration), pieces)
    return history


def check_holds(folder: Path, pieces: list[Piece]) -> None:
    with CheckpointReader(folder) as reader:
        found = [replace(piece, values=torch.empty_like(piece.values)) for piece in pieces]
        reader.fill(found)
    assert all(torch.equal(piece.values, expected.values) for piece, expected in zip(found, pieces, strict=True))


def test_each_checkpoint_holds_the_state_of_its_step_and_training_has_the_bits_of_a_run_without_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_on_gpus((1, 1), lambda gpu: train(gpu, tmp_path, monkeypatch)) == train_world((1, 1), JOB)


def test_an_update_that_does_not_wait_for_the_copy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="RaceError: .* without an order"):
        run_on_gpus((1, 1), lambda gpu: train(gpu, tmp_path, monkeypatch, waits_for_copy=False))
