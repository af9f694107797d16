"""Joins the token ids of several texts into arrays, and checks the range of ids."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_zpp.system.user_error import UserError


class TokenizedTexts(NamedTuple):
    """The ids of several texts, one text after the other."""

    ids: np.ndarray  # [sum of lengths] int32
    lengths: np.ndarray  # [texts] int64


def join_lists(lists: Iterable[list[int]]) -> TokenizedTexts:
    """Joins one list of ids per text."""
    # array.fromlist reads a list three times as fast as np.array.
    ids, lengths = array("i"), array("q")
    for members in lists:
        ids.fromlist(members)
        lengths.append(len(members))
    return TokenizedTexts(np.frombuffer(ids, np.int32), np.frombuffer(lengths, np.int64))


def join_arrays(arrays: Sequence[np.ndarray]) -> TokenizedTexts:
    """Joins one array of ids per text. Every id must be below 2^31."""
    ids = np.concatenate([np.empty(0, np.int32), *(members.astype(np.int32, copy=False) for members in arrays)])
    return TokenizedTexts(ids, np.array([len(members) for members in arrays], dtype=np.int64))


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises UserError, naming the first wrong id, if an id is outside [0, vocab_size)."""
    if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise UserError(f"Token id {wrong} is outside of the vocabulary of {vocab_size} ids; check --vocab-size or --tokenizer-model.")
