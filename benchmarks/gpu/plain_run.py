"""The training that the engine does, written with torch's own means: whole weights, one backward, AdamW on fp32 main weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.training.step import microbatch_loss
from testbed.session import LEARNING_RATE, Session

CLIP_EPSILON = 1e-6


class PlainRun:
    """A model like that of a session in a world of one, with the same first weights."""

    def __init__(self, session: Session) -> None:
        config, device = session.config, session.place.device
        dtype = next(iter(session.model.parameters())).dtype
        self._session = session
        self.model: GPT = materialize(GPT(config.model, session.padded_vocab, config.training.seed, dtype), device)
        self.main: dict[str, Tensor] = {
            spec.name: spec.initial_values(0, math.prod(spec.shape)).view(spec.shape).to(device)
            for unit in self.model.unit_specs()
            for spec in unit.params
        }
        optimizer = config.optimizer
        groups = [
            {"params": [main for main in self.main.values() if main.ndim > 1], "weight_decay": optimizer.weight_decay},
            {"params": [main for main in self.main.values() if main.ndim <= 1], "weight_decay": 0.0},
        ]
        betas = (optimizer.adam_beta1, optimizer.adam_beta2)
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=betas, eps=optimizer.adam_eps, fused=True)
        self._clip_grad = optimizer.clip_grad

    def gradients(self, step: int) -> float:
        """Computes the gradients of that step in main precision, and returns the loss."""
        for name, main in self.main.items():
            parameter = self.model.get_parameter(name)
            parameter.data.copy_(main)
            parameter.grad = None
        self.model.train()
        batch = next(iter(self._session.batches(step)))
        loss = microbatch_loss(self.model, batch, self._session.place.device)
        loss.backward()
        for name, main in self.main.items():
            gradient = self.model.get_parameter(name).grad
            main.grad = torch.zeros_like(main) if gradient is None else gradient.float()
        return float(loss.item())

    def step(self, step: int) -> tuple[float, float]:
        """Loss and norm of the gradient."""
        loss = self.gradients(step)
        norm = math.sqrt(sum(float(_gradient_of(main).double().square().sum().item()) for main in self.main.values()))
        factor = self._clip_grad / (norm + CLIP_EPSILON)
        for main in self.main.values():
            if 0 < factor < 1:
                _gradient_of(main).mul_(factor)
        self._optimizer.step()
        return loss, norm


def _gradient_of(main: Tensor) -> Tensor:
    if main.grad is None:
        raise RuntimeError("call gradients() first")
    return main.grad


def engine_gradients(session: Session) -> dict[str, Tensor]:
    """By parameter, the whole mean gradient that the engine of a world of one holds after its descents."""
    found: dict[str, Tensor] = {}
    for unit, gradient in zip(session.engine.units, session.engine.gradients, strict=True):
        for segment in unit.layout.segments(unit.first_slice, unit.slices):
            whole = found.setdefault(
                segment.spec.name, torch.zeros(math.prod(segment.spec.shape), dtype=torch.float32, device=session.place.device)
            )
            values = gradient.for_optimizer.range(segment.offset, segment.offset + segment.stop - segment.start)
            whole[segment.start : segment.stop] = values
    return found
