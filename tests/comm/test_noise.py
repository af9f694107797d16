"""Keys of stochastic rounding."""

from __future__ import annotations

import itertools

from megatron_zpp.comm.codecs import KEY_BITS, noise_key


def test_a_key_is_a_function_of_its_place_that_no_process_or_version_changes() -> None:
    assert noise_key(1234, "INTER", "block.0", 3, 17, 0) == noise_key(1234, "INTER", "block.0", 3, 17, 0)
    assert noise_key(1, "a") == 4207620368297011618


def test_places_that_differ_in_one_part_have_keys_that_differ_in_about_half_of_their_bits() -> None:
    places = list(itertools.product((1, 2), ("INTER", "INTRA"), ("block.0", "block.1"), (0, 1), (0, 1, 2)))
    keys = [noise_key(*place) for place in places]
    assert all(0 <= key < 2**KEY_BITS for key in keys)
    distances = [(left ^ right).bit_count() for left, right in itertools.combinations(keys, 2)]
    assert min(distances) > 8 and abs(sum(distances) / len(distances) - KEY_BITS / 2) < 1
