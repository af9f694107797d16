"""Builds the blended dataset of one split from the weights of its corpora."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_zpp.config.counted import counted
from megatron_zpp.data.blended_dataset import BYTES_PER_SAMPLE, BlendedDataset, BlendIndices, build_blend_indices
from megatron_zpp.data.build_once import ProgressPrinter
from megatron_zpp.data.corpus import Corpus
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.index_room import check_room
from megatron_zpp.data.split_corpora import SPLIT_WORDS


@dataclass(frozen=True)
class BlendPlan:
    """How many samples a blend has, and how many samples each of its corpora is cut into.

    weights: one per corpus, with sum 1. normalization: how often they were normalized, "once" or "twice".
    least_samples: one per corpus; it is cut into at least this many samples, even if the blend draws fewer of them.
    """

    weights: tuple[float, ...]
    sample_count: int
    least_samples: tuple[int, ...]
    normalization: str = "once"


def plan_by_weights(weights: Sequence[float], sample_count: int, surplus: float, normalization: str) -> BlendPlan:
    """Megatron's sizes for `weight prefix ...`.

    The blend is as long as the sum of the shares, each rounded up. Each corpus is cut into its rounded share plus the surplus.
    normalization: "twice" deals samples by shares that are normalized again, as Megatron does; "once" deals by the shares.
    """
    shares = normalized(weights)
    wanted = [math.ceil(sample_count * share) for share in shares]
    dealt = normalized(shares) if normalization == "twice" else shares
    return BlendPlan(dealt, sum(wanted), tuple(math.ceil(count * (1 + surplus)) for count in wanted), normalization)


def plan_by_epochs(samples_per_epoch: Sequence[int], sample_count: int) -> BlendPlan:
    """Megatron's sizes for `prefix prefix ...`: each corpus yields one epoch, and its share is its part of all samples.

    If more samples are needed than one epoch has, Megatron ends; here the corpora start over in the same shares.
    """
    shares = normalized(samples_per_epoch)
    return BlendPlan(shares, sample_count, (0,) * len(shares))


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights with sum 1, divided and added by numpy as in Megatron: their last bits decide which of equal corpora is drawn first."""
    values = np.array(weights, dtype=np.float64)
    return tuple((values / np.sum(values)).tolist())


def blended_dataset(
    corpora: Sequence[Corpus], plan: BlendPlan, split_name: str, progress: ProgressPrinter, messages: list[str]
) -> BlendedDataset:
    """The blend of corpora that all have tokens in this split. Each is cut into at least as many samples as the blend draws of it.

    Appends to `messages` what a user should know.
    """
    first = corpora[0]
    description: dict[str, object] = {
        "class": "BlendedDataset",
        "split": split_name,
        "weights": plan.weights,
        "size": plan.sample_count,
    }
    if plan.normalization != "once":  # indices that were stored before there was a choice keep their names
        description["normalization"] = plan.normalization
    cache = IndexCache(BlendIndices, first.order.folder_of(first.prefix), split_name, description)
    what = f"the {SPLIT_WORDS[split_name]} blend of {counted(len(corpora), 'corpus', 'corpora')}"

    def build() -> BlendIndices:
        check_room(BYTES_PER_SAMPLE * plan.sample_count, plan.sample_count, what, split_name)
        return build_blend_indices(plan.weights, plan.sample_count)

    cached = cache.load_or_build(build, what, progress)
    if cached.message is not None:
        messages.append(cached.message)
    datasets = []
    for corpus, share, least, drawn in zip(corpora, plan.weights, plan.least_samples, cached.indices.drawn.tolist(), strict=True):
        # If one epoch is enough, the corpus is cut into exactly one epoch.
        needed = 0 if least == 0 and drawn <= corpus.samples_per_epoch(split_name) else max(least, drawn)
        datasets.append(corpus.dataset(split_name, needed, progress, messages, share))
    return BlendedDataset(datasets, cached.indices)
