"""Samples tokens from a GPT whose weights are all in this process.

S tokens of the window, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.model.gpt import GPT
from megatron_zpp.system.user_error import UserError


@dataclass(frozen=True)
class Sampling:
    """The parameters of drawing a token from logits."""

    vocab_size: int  # higher ids are padding of the vocabulary and are never drawn
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # only the k most likely tokens can be drawn; 0: all

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature {self.temperature} is negative or no number; choose 0 for the most likely token, or more.")
        if self.top_k < 0 or self.top_k > self.vocab_size:
            raise UserError(f"top-k {self.top_k} is not within 0..{self.vocab_size}, the size of the vocabulary; choose 0 for no limit.")


def generated_tokens(model: GPT, prompt: Sequence[int], sampling: Sampling, generator: torch.Generator) -> Iterator[int]:
    """An endless iterator of token ids that continue `prompt`; the caller decides when to stop.

    Every token costs a full forward over the last seq_length tokens. generator: on the model's device; unused at temperature 0.
    Raises UserError for an empty prompt or a model in training mode.
    """
    if not prompt:
        raise UserError("the prompt is empty; give at least one token, for example the end-of-document token.")
    if model.training:
        raise UserError("the model is in training mode, where dropout is active; call eval() on it before generating.")
    return _continuation(model, list(prompt), sampling, generator)


def _continuation(model: GPT, window: list[int], sampling: Sampling, generator: torch.Generator) -> Iterator[int]:
    while True:
        window = window[-model.config.seq_length :]
        token = draw_token(next_logits(model, window), sampling, generator)
        yield token
        window.append(token)


@torch.no_grad()
def next_logits(model: GPT, window: Sequence[int]) -> Tensor:
    """logits_V in fp32 of the token that follows `window`."""
    tokens_1S = torch.tensor([window], device=model.embedding.word.weight.device)
    logits: Tensor = model(tokens_1S, None, first_sample=0)
    return logits[0, -1].float()


def draw_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token id below vocab_size, drawn from softmax(logits / temperature) over the k most likely tokens."""
    logits_V = logits_V[: sampling.vocab_size]
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    likely = torch.topk(logits_V, sampling.top_k or sampling.vocab_size)
    below_highest = (likely.values - likely.values[0]).double()  # so that no temperature makes them infinite or NaN
    probabilities = torch.softmax((below_highest / sampling.temperature).float(), dim=0)
    return int(likely.indices[torch.multinomial(probabilities, 1, generator=generator)])
