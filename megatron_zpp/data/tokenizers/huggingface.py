"""Reads a Hugging Face tokenizer.json with package tokenizers."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_zpp.data.tokenizers.batch_tokenizer import BatchTokenizer
from megatron_zpp.data.tokenizers.fast_encoder import HARD_TEXTS, IDS, FastEncoder, NotServed, from_tokenizer_json
from megatron_zpp.data.tokenizers.file_kinds import TOKENIZER_JSON, naming_other_kind
from megatron_zpp.data.tokenizers.files_beside import FilesBeside
from megatron_zpp.data.tokenizers.served_text import KnownCharacters
from megatron_zpp.data.tokenizers.token_ids import TokenizedTexts, check_ids, join_lists
from megatron_zpp.data.tokenizers.tokenizer_json import check_served
from megatron_zpp.system.outside import VOCABULARY_BYTES, OutsideFile
from megatron_zpp.system.user_error import UserError

# If no tokenizer_config.json names the end-of-document token, it is the one of these in the vocabulary; there must be exactly one.
KNOWN_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|endofdocument|>")


class HuggingFaceTokenizer(BatchTokenizer):
    """The ids of tokenizer.json and of the files beside it, including those that its own rules put around a text.

    model_path: the file or its folder. The end-of-sentence token named in the files beside it ends a document.
    adds_special_tokens: False leaves the ids around a text out.
    Added tokens spelled in a text become their ids, as in Hugging Face's classes; with split_special_tokens in tokenizer_config.json the
    special ones are plain text.
    """

    package = "tokenizers"

    def __init__(self, model_path: str, *, adds_special_tokens: bool = True) -> None:
        path = Path(model_path, "tokenizer.json") if os.path.isdir(model_path) else Path(model_path)
        self._tokenizer = _load(path, model_path)
        # A file may turn on truncation and padding, which are wrong for a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if not adds_special_tokens:
            self._tokenizer.post_processor = None
        beside = FilesBeside(path)
        beside.add_numbered_tokens(self._tokenizer)
        end = _end_token(path, beside, self._vocabulary())
        beside.add_named_tokens(self._tokenizer)
        vocabulary = self._vocabulary()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = vocabulary[end]
        named = {name: vocabulary.get(token) for name in ("bos_token", "pad_token") if (token := beside.spelling(name)) is not None}
        if adds_special_tokens:
            self.bos = self._only_begin() if named.get("bos_token") is None else named["bos_token"]
        self.pad = named.get("pad_token")
        self.tokenizer_config = beside.config
        self._splits_special_tokens = beside.splits_special_tokens
        self._split_special_tokens()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._split_special_tokens()  # which the package's own state leaves out

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def tokenizer_json(self) -> str:
        """The text of a tokenizer.json that gives the same ids without other files."""
        return str(self._tokenizer.to_str())

    def detokenize(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocab_size)
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def _fast_encoder(self) -> FastEncoder:
        if self.vocab_size > IDS:
            raise NotServed(f"ids of {IDS} and more")
        written = self.tokenizer_json()
        content = json.loads(written)
        check_served(content)
        accepts = KnownCharacters(normalizes=content["normalizer"] is not None)
        before, after = self._ids_around()
        encoder = FastEncoder(from_tokenizer_json, written.encode(), accepts, before=before, after=after)
        added = "x".join(token["content"] for token in content["added_tokens"])
        vocabulary = self._tokenizer.decode(list(content["model"]["vocab"].values()), skip_special_tokens=True)
        encoder.check((*HARD_TEXTS, "", added, f" {added} ", vocabulary), self.tokenize)
        return encoder

    def _encode_slowly(self, texts: Sequence[str]) -> TokenizedTexts:
        return join_lists(encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts)))

    def _split_special_tokens(self) -> None:
        self._tokenizer.encode_special_tokens = self._splits_special_tokens

    def _vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def _only_begin(self) -> int | None:
        """The id, other than `eod`, that is all that the tokenizer's own rules put around a text; None if there are more, or none."""
        encoding = self._tokenizer.encode("")
        added = [token for token, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if is_added]
        others = [token for token in added if token != self.eod]
        return others[0] if len(others) == 1 else None

    def _ids_around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's own rules put before and after a text."""
        encoding = self._tokenizer.encode("x")
        text = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        if not text:
            raise NotServed("x is a token that its own rules put around a text")
        return encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]


def _load(path: Path, model_path: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "--tokenizer-type HuggingFaceTokenizer needs package tokenizers, which is not installed; run: pip install tokenizers"
        ) from None
    if not path.exists():
        given = OutsideFile(Path(model_path), f"--tokenizer-model {model_path}", "give the file or its folder.")
        with naming_other_kind(given, TOKENIZER_JSON):
            given.refuse("has no tokenizer.json on this machine, and nothing is downloaded")
    source = OutsideFile(path, f"--tokenizer-model {path}", "give the file of a fast tokenizer.", most_bytes=VOCABULARY_BYTES)
    with naming_other_kind(source, TOKENIZER_JSON):
        content = source.content()
        try:
            return tokenizers.Tokenizer.from_buffer(content)
        except BaseException as error:  # the package raises Exception itself, and panics with a BaseException of its own
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            source.refuse(f"is not a tokenizer.json ({error})")


def _end_token(path: Path, beside: FilesBeside, vocabulary: dict[str, int]) -> str:
    token = beside.spelling("eos_token")
    if token is not None:
        if token not in vocabulary:
            raise UserError(
                f"{beside.file_naming('eos_token')} names {token!r} as eos_token, which {path} does not have; give files of one tokenizer."
            )
        return token
    known = [token for token in KNOWN_ENDS if token in vocabulary]
    if len(known) != 1:
        found = " and ".join(known) or "none of the usual ones"
        raise UserError(
            f"--tokenizer-model {path} does not say which token ends a document (it has {found}); "
            'put a tokenizer_config.json with "eos_token" beside it.'
        )
    return known[0]
