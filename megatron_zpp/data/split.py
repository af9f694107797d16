"""Divides the documents of a corpus into training, validation and test documents, as --split says."""

from itertools import accumulate

from megatron_zpp.config.data_sources import SPLITS, parse_split


def split_boundaries(fractions: tuple[float, float, float], document_count: int) -> tuple[int, int, int, int]:
    """(0, training end, validation end, test end) in documents. Each cumulative fraction is rounded, as Megatron Core does."""
    _, train, valid, test = (min(round(end * document_count), document_count) for end in accumulate(fractions, initial=0.0))
    return 0, train, valid, test


def split_documents(split: str, document_count: int) -> dict[str, range]:
    """The documents of each split ("train", "valid", "test"); a range may be empty.

    split: weights of the three, such as "969, 30, 1"; the parts are whole documents. Raises FlagError, a UserError, for another text.
    """
    ends = split_boundaries(parse_split(split), document_count)
    return {name: range(start, stop) for name, start, stop in zip(SPLITS, ends[:-1], ends[1:], strict=True)}
