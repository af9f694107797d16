"""Modules as other people write them, with parameters of the whole module and frozen ones; plain torch trains them for comparison."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_zpp.zero.adam import AdamOptions

WIDTH, CLASSES, IMAGE, PATCH = 16, 5, 8, 4
RATE = 1e-2
SAMPLES = 12  # of a step, over all ranks; it divides among 1, 2, 3 and 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.down(F.gelu(self.up(hidden)))


class Adapted(Block):
    """A block whose own weights are frozen, with a small adapter (LoRA) beside one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.first, self.second = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.second(self.first(hidden))


class ViT(nn.Module):
    """A class token, positions, norm and head that belong to the whole module. Its forward returns a dictionary."""

    def __init__(self, *blocks: type[Block]) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, 1 + (IMAGE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(kind() for kind in blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        hidden = self.patch(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.cls.expand(len(hidden), -1, -1), hidden], 1) + self.pos
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.head(self.norm(hidden[:, 0]))}


def vit() -> ViT:
    return ViT(Block, Block)


def adapted_vit() -> ViT:
    """Trained: adapters and head. Frozen: all others, in units with and without trained ones."""
    model = ViT(Block, Adapted)
    for part in (model.patch, model.blocks[0], model.norm):
        part.requires_grad_(False)
    model.cls.requires_grad_(False)
    model.pos.requires_grad_(False)
    return model


class FrozenBelow(nn.Sequential):
    """Nothing of the module itself is trained, and nothing in its first two units."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(IMAGE * IMAGE, WIDTH), nn.Linear(WIDTH, WIDTH), Adapted(), nn.Linear(WIDTH, CLASSES))
        self[0].requires_grad_(False)
        self[1].requires_grad_(False)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        first, second, adapted, head = self
        return {"logits": head(adapted(torch.tanh(second(first(images.flatten(1)))).unsqueeze(1)).squeeze(1))}


UNITS: dict[Callable[[], nn.Module], list[str]] = {
    vit: ["patch", "blocks.0", "blocks.1"],
    adapted_vit: ["patch", "blocks.0", "blocks.1"],
    FrozenBelow: ["0", "1", "2", "3"],
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """A module with the same first values in every call, whichever thread makes it."""
    with _making:
        if make not in _made:
            with torch.random.fork_rng():
                torch.manual_seed(5)
                _made[make] = make()
    return copy.deepcopy(_made[make])


_making = threading.Lock()
_made: dict[Callable[[], nn.Module], nn.Module] = {}


def images_of(step: int) -> Tensor:
    return torch.randn(SAMPLES, 1, IMAGE, IMAGE, generator=torch.Generator().manual_seed(100 + step))


def loss_of(model: Callable[[Tensor], dict[str, Tensor]], step: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """Mean loss of the rank's share of the samples of a step."""
    labels = torch.randint(CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(images_of(step)[rank::ranks])["logits"], labels[rank::ranks])


def trained_plainly(make: Callable[[], nn.Module], steps: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and norms of gradients, step by step, and the last weights."""
    model, adam = made(make), AdamOptions()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if (parameter.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, adam.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(adam.beta1, adam.beta2), eps=adam.eps)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        norm = torch.stack([parameter.grad.norm() for parameter in trained if parameter.grad is not None]).norm()
        history.append((loss.item(), norm.item()))
        optimizer.step()
    return history, {name: parameter.detach() for name, parameter in model.named_parameters()}
