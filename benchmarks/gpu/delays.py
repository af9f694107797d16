"""Delays of random length on the streams of a rank: before hops are prepared and landed, in the tensor link, and on computation.

A wait that is missing may never show where kernels happen to come in order. With delays they come in other orders, and bits differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_zpp.comm.backend import Backend, Work
from megatron_zpp.comm.lanes import Hop, Lanes
from megatron_zpp.parallel.specs import Use
from megatron_zpp.parallel.topology import ACROSS_LANES, Lane

CYCLES_PER_SECOND = 1.8e9  # of a GPU's clock, about
CHANCE = 0.5  # that a place has a delay

Sleep = Callable[[float], None]


def sleep_on_gpu(seconds: float) -> None:
    """Makes the current stream wait, and the host not."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


class Delays:
    """Draws delays of up to `most_seconds` from a seed. sleep: makes the current stream wait. count: how many delays there were."""

    def __init__(self, sleep: Sleep, seed: int, most_seconds: float) -> None:
        self._sleep = sleep
        self._random = random.Random(seed)
        self._most_seconds = most_seconds
        self.count = 0

    def __call__(self) -> None:
        if self._random.random() < CHANCE:
            self.count += 1
            self._sleep(self._random.uniform(0.0, self._most_seconds))

    def hold(self, seconds: float) -> None:
        """Makes the current stream wait, whatever is drawn."""
        self._sleep(seconds)

    def before(self, call: Callable[[], None]) -> Callable[[], None]:
        def delayed() -> None:
            self()
            call()

        return delayed


class DelayedLanes:
    """Lanes that sleep before they prepare and before they land a hop."""

    def __init__(self, lanes: Lanes, delays: Delays) -> None:
        self._lanes = lanes
        self._delays = delays

    def submit(self, hop: Hop) -> None:
        hop.prepare, hop.land = self._delays.before(hop.prepare), self._delays.before(hop.land)
        self._lanes.submit(hop)

    def wait(self, hop: Hop) -> None:
        self._lanes.wait(hop)

    def drain(self) -> None:
        self._lanes.drain()


class DeafLanes:
    """Lanes for which nobody waits: computation reads weights that may not have arrived. Delays that do not show it are too short."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def submit(self, hop: Hop) -> None:
        self._lanes.submit(hop)

    def wait(self, hop: Hop) -> None:
        """Returns at once."""

    def drain(self) -> None:
        self._lanes.drain()


class DelayedBackend:
    """A backend that sleeps before every collective that computation itself calls. Lanes have delays of their own."""

    def __init__(self, backend: Backend, delays: Delays) -> None:
        self.grid = backend.grid
        self.rank = backend.rank
        self._backend = backend
        self._delays = delays

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        self._sleep(lane)
        return self._backend.all_gather(lane, output, own)

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        self._sleep(lane)
        return self._backend.exchange(lane, output, sent)

    def gather_world(self, own: Tensor) -> Tensor:
        return self._backend.gather_world(own)

    def _sleep(self, lane: Lane) -> None:
        if lane in ACROSS_LANES:
            self._delays()


def delay_computation(module: nn.Module, uses: tuple[Use, ...], delays: Delays) -> None:
    """Makes computation sleep before the forward of each use, and when the gradient of its output has arrived."""

    def before_forward(submodule: nn.Module, arguments: tuple[Any, ...]) -> None:
        delays()

    def after_forward(submodule: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: delays())

    for use in uses:
        submodule = module.get_submodule(use.module)
        submodule.register_forward_pre_hook(before_forward)
        submodule.register_forward_hook(after_forward)
