"""The interface of all tokenizers, and the choice of a tokenizer by its flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_zpp.config.flag import naming_sources, next_multiple
from megatron_zpp.config.groups.data import TOKENIZER_TYPES
from megatron_zpp.config.schema import Config, DataConfig, ModelConfig
from megatron_zpp.system.user_error import UserError

if TYPE_CHECKING:
    from megatron_zpp.data.tokenizers.token_ids import TokenizedTexts

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def vocab_size(self) -> int:
        """The number of ids; all of them are below it."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def bos(self) -> int | None:
        """The id that begins a document; None if there is none."""

    @property
    def pad(self) -> int | None:
        """The id that fills a batch in other programs; None if there is none."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text."""

    def prepare_batches(self) -> str:
        """Loads what batches need. Returns a sentence on what encodes them."""

    def tokenize_batch(self, texts: Sequence[str]) -> TokenizedTexts:
        """The ids that `tokenize` gives for each text, computed in one thread."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids."""


class NullTokenizer:
    """No tokenizer: text is ids separated by spaces. As in Megatron Core of 2026 it has vocab_size ids, and by default the last is eod.

    Only the methods that tokenize import numpy, because the plan of a run needs only the size.
    """

    bos: int | None = None
    pad: int | None = None

    def __init__(self, vocab_size: int, eod: int | None = None) -> None:
        if vocab_size < 1:
            raise UserError(f"--vocab-size {vocab_size} leaves no id; give 1 or more.")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod
        if self.eod >= vocab_size:
            raise UserError(
                f"--null-tokenizer-eod-id {eod} is not below --vocab-size {vocab_size}; choose an id from 0 to {vocab_size - 1}."
            )

    def tokenize(self, text: str) -> list[int]:
        from megatron_zpp.data.tokenizers.token_ids import check_ids

        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise UserError("--tokenizer-type NullTokenizer reads text of ids separated by spaces, for example 17 4 250.") from None
        check_ids(ids, self.vocab_size)
        return ids

    def prepare_batches(self) -> str:
        return "The text already holds the ids, separated by spaces."

    def tokenize_batch(self, texts: Sequence[str]) -> TokenizedTexts:
        from megatron_zpp.data.tokenizers.token_ids import join_lists

        return join_lists(map(self.tokenize, texts))

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


def build_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that the flags describe. Raises UserError, naming the flag, for a missing or wrong value."""
    tokenizer = _build(data)
    if data.vocab_size not in (None, tokenizer.vocab_size):
        raise UserError(
            f"--vocab-size {data.vocab_size} differs from the {tokenizer.vocab_size} ids of {data.tokenizer_type} with "
            f"{' and '.join(_files(data))}; leave --vocab-size out."
        )
    return tokenizer


def tokenizer_of_run(config: Config) -> Tokenizer:
    """As `build_tokenizer`. The error says which of the flags come from a file, such as a checkpoint."""
    try:
        return build_tokenizer(config.data)
    except UserError as error:
        raise UserError(naming_sources(str(error), config.sources)) from None


def embedding_rows(model: ModelConfig, vocab_size: int) -> int:
    """Size of the vocabulary with its padding. Raises UserError if --padded-vocab-size is smaller than vocab_size."""
    if model.padded_vocab_size is None:
        return padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by)
    if model.padded_vocab_size < vocab_size:
        raise UserError(
            f"--padded-vocab-size {model.padded_vocab_size} is below the {vocab_size} ids of the tokenizer; choose {vocab_size} or more."
        )
    return model.padded_vocab_size


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least vocab_size."""
    return next_multiple(vocab_size, multiple)


def _build(data: DataConfig) -> Tokenizer:
    # A tokenizer is imported only if it is chosen, because the packages of the others may be missing.
    if data.tokenizer_type == "NullTokenizer":
        if data.vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size, the number of ids.")
        return NullTokenizer(data.vocab_size, data.null_tokenizer_eod_id)
    if data.tokenizer_type == "GPT2BPETokenizer":
        from megatron_zpp.data.tokenizers.gpt2 import GPT2BPETokenizer

        if data.vocab_file is None or data.merge_file is None:
            raise UserError("--tokenizer-type GPT2BPETokenizer needs --vocab-file (vocab.json) and --merge-file (merges.txt).")
        return GPT2BPETokenizer(data.vocab_file, data.merge_file)
    if data.tokenizer_type in ("HuggingFaceTokenizer", "HFTokenizer"):
        from megatron_zpp.data.tokenizers.huggingface import HuggingFaceTokenizer

        path = _model_path(data, "a tokenizer.json, or the folder that has one")
        return HuggingFaceTokenizer(path, adds_special_tokens=not data.tokenizer_hf_no_include_special_tokens)
    if data.tokenizer_type == "TikTokenizer":
        return _build_tik_tokenizer(data)
    return _build_sentencepiece(data)


def _build_tik_tokenizer(data: DataConfig) -> Tokenizer:
    from megatron_zpp.data.tokenizers.tik import TikTokenizer

    path = _model_path(data, "a .tiktoken file")
    if data.tiktoken_pattern is None:
        raise UserError("--tokenizer-type TikTokenizer needs --tiktoken-pattern, v1 or v2.")
    return TikTokenizer(
        path,
        data.tiktoken_pattern,
        num_special_tokens=data.tiktoken_num_special_tokens,
        special_tokens=data.tokenizer_special_tokens,
        vocab_size=data.vocab_size,
    )


def _build_sentencepiece(data: DataConfig) -> Tokenizer:
    from megatron_zpp.data.tokenizers.sentencepiece import AddingTokenizer, BeginningTokenizer, ModelTokenizer

    if data.tokenizer_type is None:
        raise UserError(f"--tokenizer-type must be given; choose one of {', '.join(TOKENIZER_TYPES)}.")
    if data.tokenizer_type not in SENTENCEPIECE_TYPES:
        raise UserError(f"--tokenizer-type {data.tokenizer_type} is unknown; choose one of {', '.join(TOKENIZER_TYPES)}.")
    path = _model_path(data, "a SentencePiece .model file")
    if data.legacy_tokenizer and data.tokenizer_type == "SentencePieceTokenizer":
        return AddingTokenizer(path, data.vocab_extra_ids)
    if data.legacy_tokenizer and data.tokenizer_type == "Llama2Tokenizer":
        return BeginningTokenizer(path)
    return ModelTokenizer(path)


def _model_path(data: DataConfig, kind: str) -> str:
    if data.tokenizer_model is None:
        raise UserError(f"--tokenizer-type {data.tokenizer_type} needs --tokenizer-model, {kind}.")
    return data.tokenizer_model


def _files(data: DataConfig) -> list[str]:
    given = {"--tokenizer-model": data.tokenizer_model, "--vocab-file": data.vocab_file, "--merge-file": data.merge_file}
    return [f"{flag} {path}" for flag, path in given.items() if path is not None]
