"""Encodes batches of texts: with gigatoken where its ids are proven, else with the package that defines the ids."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from megatron_zpp.data.tokenizers.fast_encoder import FastEncoder, NotServed, check_packages
from megatron_zpp.data.tokenizers.token_ids import TokenizedTexts, join_arrays


class BatchEncoder(NamedTuple):
    """What encodes batches, and a sentence that says so."""

    fast: FastEncoder | None
    description: str


class BatchTokenizer(ABC):
    """Base of the tokenizers that encode batches. `tokenize` and the ids are those of `package`."""

    package: str
    bos: int | None = None
    pad: int | None = None
    _batch_encoder: BatchEncoder | None = None

    def prepare_batches(self) -> str:
        """Loads what batches need, which training does not need. Returns a sentence on what encodes them."""
        return self._prepared().description

    def tokenize_batch(self, texts: Sequence[str]) -> TokenizedTexts:
        fast = self._prepared().fast
        if fast is None:
            return self._encode_slowly(texts)
        fast.bound_memory()
        return join_arrays([self._encode_slowly([text]).ids if (ids := fast.encode(text)) is None else ids for text in texts])

    @abstractmethod
    def _fast_encoder(self) -> FastEncoder:
        """Raises NotServed, with the reason, for a tokenizer whose ids are not proven."""

    @abstractmethod
    def _encode_slowly(self, texts: Sequence[str]) -> TokenizedTexts:
        """The ids of `package`."""

    def _prepared(self) -> BatchEncoder:
        if self._batch_encoder is None:
            try:
                check_packages(self.package)
                self._batch_encoder = BatchEncoder(self._fast_encoder(), f"gigatoken encodes, with the ids of {self.package}.")
            except NotServed as reason:
                self._batch_encoder = BatchEncoder(None, f"{self.package} encodes, because gigatoken cannot: {reason}.")
        return self._batch_encoder
