"""The softmax of logits of the whole vocabulary, or of the part that one of several tensor ranks has.

T tokens, V vocabulary entries of the logits.
"""

from __future__ import annotations

from torch import Tensor

from megatron_zpp.ops.softmax import Columns, LogitParts, softmax_parts
from megatron_zpp.tensor_parallel.cross_entropy import combined
from megatron_zpp.tensor_parallel.vocabulary import DividedRows


def whole_parts(logits_TV: Tensor, labels_T: Tensor, divided: DividedRows | None, *, overwrites: bool) -> LogitParts:
    """Of each token: largest logit, sum of exp(logit - largest), and the label's logit, of the whole vocabulary.

    divided: the vocabulary entries that the logits have if tensor ranks share them; then the ranks exchange their parts, once.
    overwrites: whether the logits may be overwritten.
    """
    columns = Columns(first_entry(divided), logits_TV.shape[1] if divided is None else divided.rows)
    own = softmax_parts(logits_TV, labels_T, columns, overwrites=overwrites)
    return own if divided is None else combined(own, divided.link)


def first_entry(divided: DividedRows | None) -> int:
    """The vocabulary entry of the logits' first column."""
    return 0 if divided is None else divided.first_own_row
