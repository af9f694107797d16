from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from harness.small_gpt import VOCAB, small_gpt

from megatron_zpp.model.generation import Sampling, draw_token, generated_tokens
from megatron_zpp.model.gpt import GPT
from megatron_zpp.system.user_error import UserError

PROMPT = [5, 9, 2]


def generate(model: GPT, sampling: Sampling, count: int = 20, seed: int = 0) -> list[int]:
    return list(islice(generated_tokens(model, PROMPT, sampling, torch.Generator().manual_seed(seed)), count))


def test_greedy_tokens_are_the_most_likely_continuations_of_a_sliding_window() -> None:
    model = small_gpt().eval()
    windows: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _module, inputs: windows.append(inputs[0]))
    text = PROMPT + generate(model, Sampling(VOCAB, temperature=0), count=20)
    assert [window.tolist() for window in windows] == [[text[max(0, end - model.config.seq_length) : end]] for end in range(3, 23)]
    for end, window in zip(range(3, 23), windows.copy(), strict=True):
        assert text[end] == model(window, None, first_sample=0)[0, -1].argmax().item()


def test_the_same_generator_state_yields_the_same_text_and_leaves_the_global_one_alone() -> None:
    model = small_gpt().eval()
    state = torch.get_rng_state()
    assert generate(model, Sampling(VOCAB), seed=1) == generate(model, Sampling(VOCAB), seed=1)
    assert generate(model, Sampling(VOCAB), seed=1) != generate(model, Sampling(VOCAB), seed=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_tokens_are_drawn_with_the_probabilities_of_the_tempered_softmax() -> None:
    logits_V = torch.tensor([0.0, 1.0, -1.0, 2.0, 9.0])
    generator = torch.Generator().manual_seed(3)
    sampling = Sampling(vocab_size=4, temperature=2.0)
    draws = torch.tensor([draw_token(logits_V, sampling, generator) for _ in range(4000)])
    frequencies = torch.bincount(draws, minlength=5) / 4000
    expected = torch.cat([torch.softmax(logits_V[:4] / 2.0, 0), torch.zeros(1)])
    # Four standard errors of a frequency of one half, and the fifth id is padding of the vocabulary.
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=4 * 0.5 / 4000**0.5)
    assert frequencies[4] == 0


def test_top_k_draws_the_k_most_likely_tokens_only() -> None:
    logits_V = torch.tensor([0.1, 0.3, 0.2, 0.25])
    generator = torch.Generator().manual_seed(3)
    assert {draw_token(logits_V, Sampling(4, top_k=2), generator) for _ in range(200)} == {1, 3}
    assert {draw_token(logits_V, Sampling(4, top_k=1, temperature=5.0), generator) for _ in range(20)} == {1}


@pytest.mark.parametrize(("temperature", "drawn"), [(5e-324, {1}), (1e-46, {1}), (1e-5, {1}), (math.inf, {0, 1, 2, 3})])
def test_any_temperature_above_0_draws_tokens(temperature: float, drawn: set[int]) -> None:
    logits_V = torch.tensor([0.1, 0.3, 0.2, 0.25])
    generator = torch.Generator().manual_seed(3)
    assert {draw_token(logits_V, Sampling(4, temperature=temperature), generator) for _ in range(50)} == drawn


def test_what_cannot_be_sampled_is_refused_before_the_first_token() -> None:
    model, generator = small_gpt(), torch.Generator()
    with pytest.raises(UserError, match="training mode"):
        generated_tokens(model, PROMPT, Sampling(VOCAB), generator)
    with pytest.raises(UserError, match="prompt is empty"):
        generated_tokens(model.eval(), [], Sampling(VOCAB), generator)
    for temperature in (-1.0, math.nan):
        with pytest.raises(UserError, match=f"temperature {temperature} is negative or no number"):
            Sampling(VOCAB, temperature=temperature)
    with pytest.raises(UserError, match=r"top-k 62 is not within 0\.\.61"):
        Sampling(VOCAB, top_k=62)
