from __future__ import annotations

from megatron_zpp.parallel.ranks_in_words import MOST_NAMED, first_of, ranks_in_words


def test_one_rank_is_in_the_singular_and_several_are_in_the_plural() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words(range(2)) == "ranks 0, 1"


def test_of_many_the_first_are_named_and_the_others_counted() -> None:
    assert ranks_in_words(range(MOST_NAMED + 2)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_a_name_that_occurs_twice_is_named_once() -> None:
    assert first_of(["a", "b", "a"]) == "a, b"
