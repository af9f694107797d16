"""Activation recomputation: keeps only the input of a function, and calls it again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Any, restores_generator: bool = False) -> Tensor:
    """function(*inputs), whose activations are computed again in backward instead of kept (Chen et al., arXiv 1604.06174).

    The call is repeated, so forward-pre hooks of the modules in it fire again in backward. The forward hooks of the last module may not
    fire: the repetition stops as soon as it has computed the last activation that backward needs.
    restores_generator: needed if the function draws random numbers and does not seed their generator itself.
    """
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=restores_generator)
    return output
