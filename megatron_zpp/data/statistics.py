"""Token counts of a corpus, and the loss of a model that knows only how often each token occurs."""

import numpy as np

from megatron_zpp.data.indexed_dataset import TOKEN_CHUNK_NUMEL, IndexedDataset
from megatron_zpp.system.user_error import UserError


def count_tokens(dataset: IndexedDataset, documents: range, vocab_size: int) -> np.ndarray:
    """How often each id occurs in the documents, [vocab_size] int64. All ids must be below vocab_size (see `check_token_ids`)."""
    start, stop = dataset.tokens_before(documents.start), dataset.tokens_before(documents.stop)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for begin in range(start, stop, TOKEN_CHUNK_NUMEL):
        counts += np.bincount(dataset.read_tokens(begin, min(begin + TOKEN_CHUNK_NUMEL, stop)), minlength=vocab_size)
    return counts


def unigram_cross_entropy(train_counts: np.ndarray, valid_counts: np.ndarray) -> float:
    """Mean of -log p over the validation tokens, in nats per token. p comes from the training counts plus one each.

    train_counts, valid_counts: [vocab_size]. Raises UserError if there is no validation token.
    """
    valid_total = int(valid_counts.sum())
    if valid_total == 0:
        raise UserError("There is no validation token to take the mean over; give --split a larger validation share.")
    smoothed = train_counts.astype(np.float64) + 1.0
    surprise = np.log(smoothed.sum()) - np.log(smoothed)
    return float((valid_counts * surprise).sum() / valid_total)
