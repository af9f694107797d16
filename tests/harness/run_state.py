"""The state of a run in the manifests that tests write."""

from __future__ import annotations

from typing import Any


def run_state(scheduled_samples: int) -> dict[str, Any]:
    """What a manifest says of a run that has a constant loss scale."""
    return {"scheduled_samples": scheduled_samples, "optimizer_steps": 0, "loss_scaler": {"scale": 1.0}}
