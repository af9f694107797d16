"""Tests that the mask of dropout has the rate that was asked for, and is independent in every direction; on the reference, which the
kernels equal.

Counts are sums of independent coins, so their standard error is known; all keys and seeds are fixed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_zpp.model.randomness import UnitRandomness
from megatron_zpp.ops import dropout_reference

P = 0.1
SAMPLES, TOKENS, CHANNELS = 8, 256, 136  # 278,528 elements; channels are no power of two
DEVIATION = 5.0  # standard errors: one statement in two million would fail by chance


def dropped(key: int, first_index: int, numel: int, p: float = P) -> Tensor:
    """bool [numel]: which elements are dropped."""
    values = torch.ones(numel)
    dropout_reference.drop_values(values, values, key, first_index, round(p * 2**32), 1.0)
    return values == 0


def mask_of(seed: int, unit: int, site: int, first_sample: int = 0) -> Tensor:
    """bool [samples, tokens, channels]: what a unit of a model drops at a site."""
    start = UnitRandomness(seed, unit).mask_starts(site + 1, first_sample, torch.empty(SAMPLES, TOKENS, CHANNELS))[site]
    return dropped(*start.tolist(), SAMPLES * TOKENS * CHANNELS).view(SAMPLES, TOKENS, CHANNELS)


def correlation(left: Tensor, right: Tensor) -> float:
    """That of two masks times the square root of their size: for independent masks its standard error is 1."""
    both = ((left.double() - P) * (right.double() - P)).mean()
    return float(both / (P * (1 - P)) * left.numel() ** 0.5)


def chi_square(counts: Tensor, trials: int) -> float:
    """Standard errors by which counts of `trials` coins each are spread more or less than chance spreads them."""
    squares = ((counts.double() - trials * P) ** 2 / (trials * P * (1 - P))).sum()
    return float((squares - counts.numel()) / (2 * counts.numel()) ** 0.5)


@pytest.mark.parametrize("p", [2.0**-20, 0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("start", [(0, 0), (1, 2**32 - 5000), (2**63 - 1, 2**50)])
def test_the_share_of_dropped_elements_is_p_within_the_binomial_bound(p: float, start: tuple[int, int]) -> None:
    numel = 2**20
    count = int(dropped(*start, numel, p).sum())
    assert abs(count - numel * p) <= DEVIATION * (numel * p * (1 - p)) ** 0.5 + 1


@pytest.mark.parametrize("dims", [(1, 2), (0, 2), (0, 1)], ids=["of a sample", "of a token's place", "of a channel"])
@pytest.mark.parametrize("seed", [1, 1234])
def test_the_counts_of_every_sample_token_and_channel_are_spread_as_chance_spreads_them(seed: int, dims: tuple[int, int]) -> None:
    mask = mask_of(seed, unit=3, site=1)
    counts = mask.sum(dim=dims)
    trials = mask.numel() // counts.numel()
    assert (counts - trials * P).abs().max() <= DEVIATION * (trials * P * (1 - P)) ** 0.5
    assert abs(chi_square(counts, trials)) <= DEVIATION


@pytest.mark.parametrize(
    ("dim", "distance"), [(2, 1), (2, 2), (2, 8), (2, 64), (1, 1), (1, 2), (1, 16), (1, 128), (0, 1), (0, 2), (0, 4)], ids=str
)
def test_elements_at_any_distance_in_channels_tokens_or_samples_are_dropped_independently(dim: int, distance: int) -> None:
    mask = mask_of(seed=1234, unit=1, site=0)
    near, far = mask.narrow(dim, 0, mask.shape[dim] - distance), mask.narrow(dim, distance, mask.shape[dim] - distance)
    assert abs(correlation(near, far)) <= DEVIATION


def test_every_16_neighbours_have_every_pattern_of_4_bits_as_often_as_chance_gives_it() -> None:
    bits = dropped(key=9, first_index=0, numel=2**20, p=0.5).view(-1, 4).long()
    patterns = (bits * torch.tensor([1, 2, 4, 8])).sum(1)
    counts, expected = torch.bincount(patterns, minlength=16).double(), 2**18 / 16
    squares = float(((counts - expected) ** 2 / expected).sum())
    assert abs(squares - 15) <= DEVIATION * (2 * 15) ** 0.5


def test_sites_units_seeds_and_batches_have_independent_masks() -> None:
    first = mask_of(seed=1234, unit=1, site=0)
    others = {
        "site": mask_of(1234, 1, 1),
        "next unit": mask_of(1234, 2, 0),
        "embedding": mask_of(1234, 0, 0),
        "next seed": mask_of(1235, 1, 0),
        "seed and unit exchanged": mask_of(1, 1234, 0),
        "next batch": mask_of(1234, 1, 0, first_sample=SAMPLES),
        "a batch 2^33 elements later": mask_of(1234, 1, 0, first_sample=2**33 // (TOKENS * CHANNELS) + 1),
    }
    found = {name: correlation(first, other) for name, other in others.items()}
    assert all(abs(value) <= DEVIATION for value in found.values()), found


def test_masks_of_neighbouring_seeds_and_units_are_independent_pair_by_pair() -> None:
    masks = torch.stack([mask_of(seed, unit, site) for seed in range(3) for unit in range(3) for site in range(2)]).flatten(1).double()
    products = (masks - P) @ (masks - P).t() / (P * (1 - P)) / masks.shape[1] ** 0.5
    assert products.fill_diagonal_(0).abs().max() <= DEVIATION


def test_a_sample_has_the_same_mask_wherever_it_is_in_a_batch() -> None:
    whole = mask_of(seed=5, unit=2, site=0, first_sample=16)
    assert torch.equal(mask_of(seed=5, unit=2, site=0, first_sample=19)[: SAMPLES - 3], whole[3:])


def test_half_of_all_elements_change_with_any_bit_of_the_key_or_the_index() -> None:
    """With p of 1/2. Neighbouring indices are those of a run, so a lattice in the hash would show in some bit."""
    numel = 2**12
    here = dropped(key=77, first_index=2**40, numel=numel, p=0.5)
    for bit in range(63):
        other_key = dropped(77 ^ 1 << bit, 2**40, numel, 0.5)
        assert abs(int((here != other_key).sum()) - numel / 2) <= DEVIATION * numel**0.5 / 2, f"key {bit}"
    for bit in range(12, 62):
        other_index = dropped(77, 2**40 ^ 1 << bit, numel, 0.5)
        assert abs(int((here != other_index).sum()) - numel / 2) <= DEVIATION * numel**0.5 / 2, f"index {bit}"
