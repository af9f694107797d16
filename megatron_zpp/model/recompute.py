"""Activation recomputation: keeps only the input of a function, and calls it again in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def recomputed(
    function: Callable[..., Tensor], *inputs: Any, restores_generator: bool = False, hooks: saved_tensors_hooks | None = None
) -> Tensor:
    """function(*inputs), whose activations are computed again in backward instead of kept (Chen et al., arXiv 1604.06174).

    The call is repeated, so forward-pre hooks of the modules in it fire again in backward. The forward hooks of the last module may not
    fire: the repetition stops as soon as it has computed the last activation that backward needs.
    restores_generator: needed if the function draws random numbers and does not seed their generator itself.
    hooks: keep the tensors among the inputs. Tensors that the function saves pass them by, because the checkpoint has hooks of its own.
    """
    with nullcontext() if hooks is None else hooks:
        output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=restores_generator)
    return output
