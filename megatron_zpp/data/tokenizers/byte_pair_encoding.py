"""Byte-level byte-pair encoding with the ids of tiktoken's ranks, or freely chosen ones."""

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_zpp.data.tokenizers.batch_tokenizer import BatchTokenizer
from megatron_zpp.data.tokenizers.fast_encoder import HARD_TEXTS, IDS, FastEncoder, FromRanks, NotServed
from megatron_zpp.data.tokenizers.served_text import KnownCharacters
from megatron_zpp.data.tokenizers.token_ids import TokenizedTexts, check_ids, join_arrays
from megatron_zpp.system.user_error import UserError

# Unicode's White_Space, which is what \s means in tiktoken's patterns; Python's own \s includes more.
WHITE_SPACE_RUN = re.compile(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
# tiktoken fails on runs of about a million characters. Much shorter runs are common and need no cutting.
LONG_RUN_CHARACTERS = 100_000


class BytePairEncoding(BatchTokenizer):
    """Encodes texts: a pattern cuts a text into parts, and in each part bytes are merged, lowest rank first.

    ranks: token to rank, 0 to len - 1. id_of_rank: [len(ranks)] int32. added: ids and spellings of tokens that no text is encoded to.
    fast_scheme: gigatoken's name of the pattern, None if it has none.
    splits_runs: the pattern matches a run of white space without its last character, or the full run at the end of a text.
    """

    package = "tiktoken"

    def __init__(
        self,
        pattern: str,
        ranks: dict[bytes, int],
        id_of_rank: np.ndarray,
        added: dict[int, str],
        *,
        fast_scheme: str | None,
        splits_runs: bool = False,
    ) -> None:
        self._pattern = pattern
        self._fast_scheme = fast_scheme
        self._ranks = ranks
        self._id_of_rank = id_of_rank
        self._added = added
        self._splits_runs = splits_runs
        self._bytes_of_id: dict[int, bytes] | None = None
        self._encoding = self._make_encoding()
        self.vocab_size = max([*added, int(id_of_rank.max())]) + 1

    def tokenize(self, text: str) -> list[int]:
        return self._id_of_rank[self._encode(text)].tolist()

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text. Bytes that are not valid UTF-8 become U+FFFD."""
        check_ids(ids, self.vocab_size)
        if self._bytes_of_id is None:
            self._bytes_of_id = {int(self._id_of_rank[rank]): token for token, rank in self._ranks.items()}
            self._bytes_of_id.update({token_id: spelling.encode() for token_id, spelling in self._added.items()})
        return b"".join(self._bytes_of_id.get(int(token_id), b"") for token_id in ids).decode("utf-8", errors="replace")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_encoding"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._encoding = self._make_encoding()

    def _fast_encoder(self) -> FastEncoder:
        # gigatoken finds the two tokens that each token is made of, and refuses ranks where they are not two. Where they are, merging pairs
        # in this order gives the tokens that merging by ranks gives.
        if self._fast_scheme is None:
            raise NotServed("it does not know the pattern")
        if len(self._ranks) >= IDS:
            raise NotServed(f"{len(self._ranks)} tokens")
        tokens = sorted(self._ranks, key=self._ranks.__getitem__)
        lines = b"".join(b"%b %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
        encoder = FastEncoder(FromRanks(self._fast_scheme), lines, KnownCharacters(normalizes=False), id_of=self._id_of_rank)
        encoder.check((*HARD_TEXTS, b"\n".join(tokens).decode("utf-8", errors="ignore")), self.tokenize)
        return encoder

    def _encode_slowly(self, texts: Sequence[str]) -> TokenizedTexts:
        ranks, lengths = join_arrays([self._encode(text) for text in texts])
        return TokenizedTexts(self._id_of_rank[ranks], lengths)

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            parts = list(_cut_at_long_runs(text)) if self._splits_runs else []
            if len(parts) < 2:
                raise
            return np.concatenate([self._encoding.encode_to_numpy(part, disallowed_special=()) for part in parts])

    def _make_encoding(self) -> Any:
        try:
            import tiktoken
        except ImportError:
            raise UserError("this --tokenizer-type needs package tiktoken, which is not installed; run: pip install tiktoken") from None
        return tiktoken.Encoding("megatron_zpp", pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens={})


def _cut_at_long_runs(text: str) -> Iterator[str]:
    """The text cut before the last character of each long run of white space. The parts have the same ids as the full text."""
    start = 0
    for run in WHITE_SPACE_RUN.finditer(text):
        if run.end() - run.start() > LONG_RUN_CHARACTERS and run.end() < len(text):
            yield text[start : run.end() - 1]
            start = run.end() - 1
    yield text[start:]
