"""The order of training samples as three arrays, identical to Megatron's.

Documents are laid end to end in a shuffled order, `epochs` times. This stream is cut into samples of seq_length tokens; each sample
shares its last token with the next one. Then the samples are shuffled.

    documents      5 tokens | 3 | 6 | ...          document index   which document is at each position of the stream
    stream         a a a a a b b b c c c c c c ...
    seq_length 4   |       |       |       |       sample index     (position in the document index, offset in that document)
    samples        0       1       2       3       shuffle index    which sample is served first, second, ...
"""

from typing import NamedTuple

import numpy as np

from megatron_zpp.data.epochs import Epochs, plan_epochs
from megatron_zpp.data.index_builders import cut_samples
from megatron_zpp.data.reading import CorpusOrder
from megatron_zpp.data.stored_array import Rows


class GPTIndices(NamedTuple):
    """The order of the samples of one corpus: the stream of documents, the cuts in it, and the order of what lies between the cuts."""

    document: Rows  # [epochs * documents] int32
    sample: Rows  # [samples + 1, 2] int32, or int64 if values are too large
    shuffle: Rows  # [samples] uint32, or int64 if values are too large


def needed_bytes(epochs: Epochs, document_count: int) -> int:
    """The memory that the three arrays take at least."""
    return 4 * epochs.repeats * document_count + (8 + _shuffle_dtype(epochs).itemsize) * epochs.sample_count


def build_gpt_indices(lengths: np.ndarray, documents: range, *, sample_count: int, seq_length: int, seed: int) -> GPTIndices:
    """The indices of at least sample_count samples over the given documents.

    lengths: [all documents] int32, in tokens.
    seed: of the order of documents and samples.
    Raises RuntimeError if the documents hold no token.
    """
    tokens_per_epoch = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise RuntimeError(f"documents {documents.start} to {documents.stop} hold no token to cut samples from")
    epochs = plan_epochs(tokens_per_epoch, sample_count=sample_count, seq_length=seq_length)
    generator = np.random.RandomState(seed)
    document_index = _shuffled_documents(documents, epochs, generator)
    sample_index = cut_samples(lengths, document_index, sample_count=epochs.sample_count, seq_length=seq_length)
    return GPTIndices(document_index, sample_index, _shuffled_samples(epochs, generator))


def indices_of(order: CorpusOrder, lengths: np.ndarray) -> GPTIndices:
    """The indices of the samples in this order. lengths: as for `build_gpt_indices`, at least those of the documents of the order."""
    return build_gpt_indices(lengths, order.documents, sample_count=order.sample_count, seq_length=order.seq_length, seed=order.seed)


def _shuffled_documents(documents: range, epochs: Epochs, generator: np.random.RandomState) -> np.ndarray:
    groups = [epochs.repeats] if epochs.shuffled_apart_from is None else [epochs.repeats - 1, 1]
    parts = [np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), repeats) for repeats in groups]
    for part in parts:
        generator.shuffle(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _shuffled_samples(epochs: Epochs, generator: np.random.RandomState) -> np.ndarray:
    split = epochs.sample_count if epochs.shuffled_apart_from is None else epochs.shuffled_apart_from
    order = np.arange(epochs.sample_count, dtype=_shuffle_dtype(epochs))
    generator.shuffle(order[:split])
    if split < epochs.sample_count:
        generator.shuffle(order[split:])
    return order


def _shuffle_dtype(epochs: Epochs) -> np.dtype:
    return np.dtype(np.uint32 if epochs.sample_count < np.iinfo(np.uint32).max - 1 else np.int64)
