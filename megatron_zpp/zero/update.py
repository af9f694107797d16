"""What one step of AdamW needs beside weights, gradients and moments."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One step of AdamW. factor: of the gradients, a number or [] fp32; it unscales and clips them. skips: see Adam.update.

    unused: paths of parameters that it passes over: they neither decay nor go on by their moments, as in plain torch without a gradient.
    Raises ValueError for a learning rate or weight decay that is negative, NaN or infinite.
    """

    learning_rate: float
    weight_decay: float
    factor: float | Tensor = 1.0
    skips: Tensor | None = None
    unused: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, value in (("learning_rate", self.learning_rate), ("weight_decay", self.weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; give a finite number, 0 or more")
