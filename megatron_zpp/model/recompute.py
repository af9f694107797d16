"""Forward now, keep only the input, and forward again in backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(module: nn.Module, *inputs: Any) -> Tensor:
    """module(*inputs), whose activations are computed again in backward instead of kept (Chen et al., arXiv 1604.06174).

    The whole module call is repeated, so its forward-pre hooks fire again in backward. Its forward hooks may not: the repetition ends
    as soon as the last activation that backward needs is there. No generator state is stored: the module draws from seeded scopes.
    """
    output: Tensor = checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output
