"""How far rounding moves a gradient: what two orders of the same sums may differ by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
from torch import Tensor

from megatron_zpp.model.gpt import GPT

DRAWS, CHANGE = 3, 1e-6  # sets of weights, each value of which differs by a few roundings


def gradient_tolerances(whole: GPT, gradients_of: Callable[[GPT], Mapping[str, Tensor]], least: float) -> dict[str, float]:
    """A tolerance for each gradient, as a share of its largest value: twice the error of the whole model's own, and at least `least`.

    Where terms cancel, as in the norms of queries and keys, that error is large. With one set of weights it may happen to be small, so the
    largest of several sets counts.
    """
    largest: dict[str, float] = {}
    for draw in range(1 + DRAWS):
        model = deepcopy(whole).eval()
        generator = torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for parameter in model.parameters() if draw else ():
                parameter.mul_(1 + CHANGE * torch.randn(parameter.shape, generator=generator))
        own, exact = gradients_of(deepcopy(model)), gradients_of(model.double())
        for name, value in exact.items():
            error = float((own[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
            largest[name] = max(largest.get(name, 0.0), error)
    return {name: max(least, 2 * error) for name, error in largest.items()}
