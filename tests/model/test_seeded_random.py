from __future__ import annotations

import pytest
import torch

from megatron_zpp.model.randomness import mixed, seeded_random
from megatron_zpp.ops.reference import splitmix64

CPU = torch.device("cpu")


def draw(seed: int, first_sample: int, unit_index: int) -> torch.Tensor:
    with seeded_random(CPU, seed, first_sample, unit_index):
        return torch.rand(100)


def test_splitmix64_gives_the_published_outputs() -> None:
    increment = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [splitmix64((1234567 + step * increment) % 2**64) for step in range(5)] == published


def test_nearby_seeds_samples_and_units_differ_also_in_the_bits_a_cpu_generator_reads() -> None:
    seeds = [mixed(seed, sample, unit) for seed in range(10) for sample in range(100) for unit in range(10)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert mixed(1, 2, 3) != mixed(2, 1, 3) != mixed(1, 3, 2)


def test_a_scope_yields_the_same_numbers_whatever_came_before() -> None:
    torch.manual_seed(1)
    first = draw(1234, 8, 2)
    torch.manual_seed(2)
    torch.randn(77)
    assert torch.equal(draw(1234, 8, 2), first)
    assert not any(torch.equal(draw(*other), first) for other in [(1235, 8, 2), (1234, 9, 2), (1234, 8, 3)])


def test_the_callers_generator_continues_as_if_the_scope_had_not_been() -> None:
    torch.manual_seed(1)
    expected = torch.randn(10)
    torch.manual_seed(1)
    before = torch.randn(3)
    with seeded_random(CPU, 1, 2, 3):
        torch.randn(7)
        with seeded_random(CPU, 4, 5, 6):
            torch.randn(7)
    with pytest.raises(KeyError), seeded_random(CPU, 1, 2, 3):
        torch.randn(7)
        raise KeyError
    assert torch.equal(torch.cat([before, torch.randn(7)]), expected)


def test_a_device_without_a_known_generator_is_named() -> None:
    with pytest.raises(RuntimeError, match="meta"), seeded_random(torch.device("meta"), 1, 2, 3):
        pass
