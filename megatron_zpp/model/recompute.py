"""Forward now, keep only the input, and forward again in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Any, restores_generator: bool = False) -> Tensor:
    """function(*inputs), whose activations are computed again in backward instead of kept (Chen et al., arXiv 1604.06174).

    The whole call is repeated, so forward-pre hooks of the modules in it fire again in backward. The forward hooks of the last one may not:
    the repetition ends as soon as the last activation that backward needs is there.
    restores_generator: for a function that draws random numbers and does not seed their generator itself.
    """
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=restores_generator)
    return output
