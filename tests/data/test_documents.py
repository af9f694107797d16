import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.documents import DocumentRules

EOD = 9
ALL = DocumentRules(EOD, resets_positions=True, resets_attention=True, masks_loss=True)
NONE = DocumentRules(EOD, resets_positions=False, resets_attention=False, masks_loss=False)

samples = st.integers(1, 12).flatmap(
    lambda length: st.lists(st.lists(st.sampled_from([1, 2, EOD]), min_size=length, max_size=length), min_size=1, max_size=4)
)


def test_the_picture() -> None:
    tokens = np.array([[1, 1, 1, EOD, 2, 2, EOD, EOD, 3, 3]])
    positions, lengths = ALL.position_ids(tokens), ALL.document_lengths(tokens)
    assert positions is not None and positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 0, 1]]
    assert lengths is not None and lengths.tolist() == [4, 3, 1, 2]
    mask = ALL.loss_mask(tokens, np.ones(tokens.shape, dtype=np.float32))
    assert mask.tolist() == [[1, 1, 1, 0, 1, 1, 0, 0, 1, 1]] and mask.dtype == np.float32


@given(rows=samples)
def test_positions_lengths_and_mask_follow_megatrons_loop(rows: list[list[int]]) -> None:
    tokens = np.array(rows)
    length = tokens.shape[1]
    positions, lengths = ALL.position_ids(tokens), ALL.document_lengths(tokens)
    assert positions is not None and lengths is not None
    run = np.repeat(np.arange(len(lengths)), lengths).reshape(tokens.shape)
    for row, ids in enumerate(tokens):
        expected = np.arange(length)
        attends = np.tril(np.ones((length, length), dtype=bool))
        previous = 0
        for end in np.flatnonzero(ids == EOD):
            attends[end + 1 :, : end + 1] = False
            expected[end + 1 :] -= end + 1 - previous
            previous = end + 1
        assert positions[row].tolist() == expected.tolist()
        assert np.array_equal(np.tril(run[row][:, None] == run[row][None, :]), attends)
    assert lengths.sum() == tokens.size and lengths.min() >= 1
    assert np.array_equal(ALL.loss_mask(tokens, np.ones(tokens.shape, dtype=np.float32)) == 0, tokens == EOD)


def test_without_rules_nothing_is_made_and_the_mask_stays_what_it_is() -> None:
    tokens, mask = np.array([[1, EOD, 2]]), np.ones((1, 3), dtype=np.float32)
    assert NONE.position_ids(tokens) is None and NONE.document_lengths(tokens) is None
    assert NONE.loss_mask(tokens, mask) is mask


@pytest.mark.parametrize("name", ["resets_positions", "resets_attention", "masks_loss"])
def test_each_rule_stands_alone(name: str) -> None:
    rules = DocumentRules(EOD, **{"resets_positions": False, "resets_attention": False, "masks_loss": False, name: True})
    tokens, ones = np.array([[1, EOD, 2]]), np.ones((1, 3), dtype=np.float32)
    found = (rules.position_ids(tokens) is not None, rules.document_lengths(tokens) is not None, not rules.loss_mask(tokens, ones).all())
    assert found == tuple(name == other for other in ("resets_positions", "resets_attention", "masks_loss"))
