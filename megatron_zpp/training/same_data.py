"""Checks that all ranks have the same tokenizer and corpora: nodes may read copies of their own, one of which may be old."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest

from megatron_zpp.checkpoint.disk import Gather
from megatron_zpp.config.counted import counted
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.parallel.initialize import StartupError
from megatron_zpp.training.setup import Vocabulary

NOTHING = ("no corpus", "0 tokens")


def check_same_data(vocabulary: Vocabulary, sources: Sequence[IndexedDataset], gather: Gather) -> None:
    """Raises StartupError on every rank if the vocabularies or the corpora of two ranks differ in size, and names both.

    Every rank must call it. sources: the corpora in the order of the flags; their paths may differ. gather: returns the text of every rank.
    """
    own = [("a tokenizer", f"{vocabulary.size} ids, of which {vocabulary.eod} ends a document")]
    own += [(source.prefix, f"{counted(len(source), 'document')} and {counted(source.token_count, 'token')}") for source in sources]
    sizes = "\n".join(size for _, size in own)
    if len(set(gather(hashlib.sha256(sizes.encode()).hexdigest()))) == 1:  # the sizes themselves may be many
        return
    first, *others = (json.loads(text) for text in gather(json.dumps(own)))
    for rank, other in enumerate(others, 1):
        for (name, size), (their_name, their_size) in zip_longest(first, other, fillvalue=NOTHING):
            if size != their_size:
                raise StartupError(
                    f"the ranks have different data: {name} with {size} on rank 0, and {their_name} with {their_size} on rank {rank}; "
                    "give every rank the same files."
                )
