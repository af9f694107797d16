"""Loss scales: constant, or dynamic with hysteresis as in Megatron. A dynamic one doubles after many good steps and halves at overflows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LossScaler(Protocol):
    """The factor on the loss of an fp16 run, adjusted after each step."""

    scale: float

    def update(self, *, is_overflow: bool) -> None: ...

    def state(self) -> dict[str, float]: ...

    def load_state(self, state: dict[str, float]) -> None: ...


@dataclass
class ConstantLossScaler:
    """One scale for the whole run. It is 1 unless the run is in fp16."""

    scale: float = 1.0

    def update(self, *, is_overflow: bool) -> None:
        return None

    def state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state(self, state: dict[str, float]) -> None:
        """Changes nothing: the flags of this run set the scale."""
        return


@dataclass
class DynamicLossScaler:
    """Doubles after `window` steps in a row without overflow. Halves at an overflow, down to `min_scale`.

    The first `hysteresis` - 1 overflows after the start, and after each doubling, do not halve it.
    """

    scale: float = 2.0**32
    min_scale: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    _good_steps: int = 0
    _patience: int = -1

    def __post_init__(self) -> None:
        if self._patience < 0:
            self._patience = self.hysteresis

    def update(self, *, is_overflow: bool) -> None:
        if is_overflow:
            self._good_steps = 0
            self._patience -= 1
            if self._patience <= 0:
                self.scale = max(self.scale * 0.5, self.min_scale)
            return
        self._good_steps += 1
        if self._good_steps == self.window:
            self._good_steps = 0
            self._patience = self.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self._good_steps, "patience": self._patience}

    def load_state(self, state: dict[str, float]) -> None:
        """Continues from the state of a dynamic scale. Ignores the state of a constant scale, such as that of a bf16 run."""
        if "good_steps" not in state:
            return
        self.scale = state["scale"]
        self._good_steps = int(state["good_steps"])
        self._patience = int(state["patience"])
