"""Where documents end inside the samples of a micro-batch, and what that changes; the same rules as Megatron's.

B samples, S tokens each, D runs of one document each in all samples.

    tokens        a a a E b b E E c c        E: the end-of-document token
    positions     0 1 2 3 0 1 2 0 0 1        --reset-position-ids
    lengths       4       3     1 2          --reset-attention-mask: attention stays inside each run
    loss mask     1 1 1 0 1 1 0 0 1 1        --eod-mask-loss: what comes after E is not predicted
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DocumentRules:
    """What an end-of-document token, `eod`, changes."""

    eod: int
    resets_positions: bool
    resets_attention: bool
    masks_loss: bool

    def position_ids(self, tokens_BS: np.ndarray) -> np.ndarray | None:
        """[B, S] int64: the place of each token in its document; None where positions simply count."""
        if not self.resets_positions:
            return None
        positions = np.arange(tokens_BS.shape[1], dtype=np.int64)
        starts_BS = np.where(self._starts(tokens_BS), positions, 0)
        return positions - np.maximum.accumulate(starts_BS, axis=1)

    def document_lengths(self, tokens_BS: np.ndarray) -> np.ndarray | None:
        """[D] int64, in tokens, sample after sample; a sample ends a run. None where attention crosses documents."""
        if not self.resets_attention:
            return None
        starts = np.flatnonzero(self._starts(tokens_BS))
        return np.diff(starts, append=tokens_BS.size)

    def loss_mask(self, tokens_BS: np.ndarray, loss_mask_BS: np.ndarray) -> np.ndarray:
        """The mask, [B, S] fp32, without the positions whose input ends a document."""
        return np.where(tokens_BS == self.eod, np.float32(0), loss_mask_BS) if self.masks_loss else loss_mask_BS

    def _starts(self, tokens_BS: np.ndarray) -> np.ndarray:
        """[B, S] bool: whether a document, or the sample, starts here."""
        starts = np.ones_like(tokens_BS, dtype=bool)
        starts[:, 1:] = tokens_BS[:, :-1] == self.eod
        return starts
