"""What the end of a document inside a sample changes: positions, attention and the loss mask, by Megatron's rules.

B samples of S tokens each; together they hold D runs of tokens that belong to one document each.

    tokens        a a a E b b E E c c        E: the end-of-document token
    positions     0 1 2 3 0 1 2 0 0 1        --reset-position-ids
    lengths       4       3     1 2          --reset-attention-mask: attention stays inside each run
    loss mask     1 1 1 0 1 1 0 0 1 1        --eod-mask-loss: the token after E is not predicted
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DocumentRules:
    """Which effects the end-of-document token `eod` has."""

    eod: int
    resets_positions: bool
    resets_attention: bool
    masks_loss: bool

    def position_ids(self, tokens_BS: np.ndarray) -> np.ndarray | None:
        """The place of each token in its document, [B, S] int64; None if every sample simply counts from 0."""
        if not self.resets_positions:
            return None
        positions = np.arange(tokens_BS.shape[1], dtype=np.int64)
        starts_BS = np.where(self._starts(tokens_BS), positions, 0)
        return positions - np.maximum.accumulate(starts_BS, axis=1)

    def document_lengths(self, tokens_BS: np.ndarray) -> np.ndarray | None:
        """The length of each run in tokens, [D] int64, sample after sample. A run also ends with its sample.

        None if attention crosses documents.
        """
        if not self.resets_attention:
            return None
        starts = np.flatnonzero(self._starts(tokens_BS))
        return np.diff(starts, append=tokens_BS.size)

    def loss_mask(self, tokens_BS: np.ndarray, loss_mask_BS: np.ndarray) -> np.ndarray:
        """The loss mask, [B, S] fp32, with 0 at positions whose input token ends a document (with --eod-mask-loss)."""
        return np.where(tokens_BS == self.eod, np.float32(0), loss_mask_BS) if self.masks_loss else loss_mask_BS

    def _starts(self, tokens_BS: np.ndarray) -> np.ndarray:
        """[B, S] bool: whether a document, or the sample, starts here."""
        starts = np.ones_like(tokens_BS, dtype=bool)
        starts[:, 1:] = tokens_BS[:, :-1] == self.eod
        return starts
