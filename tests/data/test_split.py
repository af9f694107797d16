from fractions import Fraction

import pytest
from harness.tiny_corpus import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.data_sources import parse_split
from megatron_zpp.data.split import split_boundaries, split_documents
from megatron_zpp.system.user_error import UserError


def test_boundaries_equal_megatrons() -> None:
    golden = GOLDEN["split_boundaries"]
    assert list(split_boundaries(parse_split(golden["split"]), golden["documents"])) == golden["ends"]


@pytest.mark.parametrize(
    "split", ["969, 30, 1", "969,30,1", "969/30/1", "0.969, 0.03, 0.001", "'969,30,1'", '"969, 30, 1"', " 969 ,30 / 1 ", "969 30 1"]
)
def test_all_spellings_mean_the_same_fractions(split: str) -> None:
    assert parse_split(split) == pytest.approx((0.969, 0.03, 0.001), abs=1e-15)


def test_parts_left_out_are_zero() -> None:
    assert (parse_split("1"), parse_split("3, 1")) == ((1.0, 0.0, 0.0), (0.75, 0.25, 0.0))


@pytest.mark.parametrize("split", ["", ",", "a,b,c", "1;2;3", "1,,1", "1,2,3,4", "-1,2,3", "0,0,0"])
def test_every_other_split_is_refused_by_name(split: str) -> None:
    with pytest.raises(UserError, match="--split .*969, 30, 1"):
        parse_split(split)


@pytest.mark.parametrize("split", ["nan,1,1", "inf,1,1", "1e400,1", "1e308,1e308", "1e999999999"])
def test_parts_that_are_not_finite_numbers_are_refused_by_name(split: str) -> None:
    with pytest.raises(UserError, match=f'--split has a part that is negative, not a number or too large, .*; found "{split}"'):
        parse_split(split)


@given(parts=st.tuples(*[st.integers(0, 1000)] * 3).filter(any), document_count=st.integers(0, 10**7))
def test_splits_partition_the_documents_and_lie_within_one_of_the_exact_share(parts: tuple[int, int, int], document_count: int) -> None:
    documents = split_documents(",".join(map(str, parts)), document_count)
    train, valid, test = documents.values()
    assert (train.start, train.stop, valid.stop, test.stop) == (0, valid.start, test.start, document_count)
    for part, split in zip(parts, documents.values(), strict=True):
        assert abs(len(split) - Fraction(part * document_count, sum(parts))) <= 1
