"""The result of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step: the gradient norm before clipping, and whether the step was skipped for a NaN or inf.

    num_zeros: number of zeros in the mean gradient, if the engine counts them. report: the caller's own numbers.
    """

    grad_norm: float
    is_skipped: bool
    num_zeros: int | None
    report: tuple[float, ...]
