"""From weights to the dataset of one split: how many samples each corpus must yield, and in which order they are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_zpp.data.blended_dataset import BlendedDataset, BlendIndices, build_blend_indices
from megatron_zpp.data.build_once import Speaker
from megatron_zpp.data.corpus import SPLIT_WORDS, Corpus
from megatron_zpp.data.index_cache import IndexCache


@dataclass(frozen=True)
class BlendPlan:
    """weights: of each corpus, with sum 1. least_samples: that each corpus is cut into even if the blend draws less of it."""

    weights: tuple[float, ...]
    sample_count: int
    least_samples: tuple[int, ...]


def plan_by_weights(weights: Sequence[float], sample_count: int, surplus: float) -> BlendPlan:
    """Megatron's sizes for `weight prefix ...`: a corpus yields its share, rounded up, and the surplus; the blend is the sum of shares."""
    shares = normalized(weights)
    wanted = [math.ceil(sample_count * share) for share in shares]
    return BlendPlan(shares, sum(wanted), tuple(math.ceil(count * (1 + surplus)) for count in wanted))


def plan_by_epochs(samples_per_epoch: Sequence[int], sample_count: int) -> BlendPlan:
    """Megatron's sizes for `prefix prefix ...`: every corpus yields one epoch, drawn in the shares of their samples.

    Where more samples are asked for than one epoch of all has, where Megatron ends, corpora start over in the same shares.
    """
    shares = normalized(samples_per_epoch)
    return BlendPlan(shares, sample_count, (0,) * len(shares))


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights with sum 1, as numpy divides and adds them: the last bits decide who is drawn first among equals."""
    values = np.array(weights, dtype=np.float64)
    return tuple((values / np.sum(values)).tolist())


def blended_dataset(corpora: Sequence[Corpus], plan: BlendPlan, split_name: str, speaker: Speaker, messages: list[str]) -> BlendedDataset:
    """The blend of corpora that have tokens in this split, each cut into as many samples as the blend draws of it, or more.

    Appends to `messages` what a user should know.
    """
    first = corpora[0]
    description = {"class": "BlendedDataset", "split": split_name, "weights": plan.weights, "size": plan.sample_count}
    cache = IndexCache(BlendIndices, first.order.folder_of(first.prefix), split_name, description)
    what = f"the {SPLIT_WORDS[split_name]} blend of {len(corpora)} corpora"
    cached = cache.load_or_build(lambda: build_blend_indices(plan.weights, plan.sample_count), what, speaker)
    if cached.message is not None:
        messages.append(cached.message)
    datasets = []
    for corpus, least, drawn in zip(corpora, plan.least_samples, cached.indices.drawn.tolist(), strict=True):
        # A corpus of which one epoch is enough is cut into one epoch.
        needed = 0 if least == 0 and drawn <= corpus.samples_per_epoch(split_name) else max(least, drawn)
        datasets.append(corpus.dataset(split_name, needed, speaker, messages))
    return BlendedDataset(datasets, cached.indices)
