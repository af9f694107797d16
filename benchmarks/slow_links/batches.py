"""The micro-batches of a rank: random ones that come again, where only speed counts, and a text's, where the loss counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.loss_study.text import Text
from megatron_zpp.config.schema import Config
from megatron_zpp.data.loader import MicroBatch

# The endless micro-batches of the data ranks with these numbers, one after the other; ranks that share layers share those of several.
Batches = Callable[[Config, Sequence[int]], Iterator[MicroBatch]]


def microbatches(config: Config, data_ranks: int) -> int:
    return config.training.global_batch_size // (config.training.micro_batch_size * data_ranks)


def same_batches(config: Config, numbers: Sequence[int]) -> Iterator[MicroBatch]:
    """Yields one micro-batch of random tokens for each number, over and over; they are equal in every configuration."""
    return itertools.cycle([_random_batch(config, number) for number in numbers])


def _random_batch(config: Config, number: int) -> MicroBatch:
    samples, length = config.training.micro_batch_size, config.model.seq_length
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, config.data.vocab_size or 1, (samples, length + 1), generator=generator)
    return _batch(tokens[:, :-1], tokens[:, 1:], number * samples)


def text_batches(text: Text, data_ranks: int, config: Config, numbers: Sequence[int]) -> Iterator[MicroBatch]:
    """Yields micro-batches of a text. After as many tokens every batch size has read the same samples, which depend on the seed alone."""
    own = config.training.micro_batch_size
    for index in itertools.count():
        tokens, labels = text.training_batch(config.training.seed, index, own * data_ranks)
        for number in numbers:
            rows = slice(own * number, own * (number + 1))
            yield _batch(tokens[rows], labels[rows], own * (data_ranks * index + number))


def _batch(tokens: Tensor, labels: Tensor, first_sample: int) -> MicroBatch:
    return MicroBatch(tokens.contiguous(), labels.contiguous(), torch.ones(tokens.shape), first_sample)
