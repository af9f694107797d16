"""Text to token ids and back."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import sentencepiece

from megatron_zpp.config.schema import DataConfig

# Megatron's order; what the model lacks gets the ids after its last one.
ADDED_PIECES = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


class GPTSentencePieceTokenizer:
    """The ids of a SentencePiece model as they are; its end-of-sentence piece ends a document."""

    def __init__(self, model_path: str) -> None:
        self._pieces = _load_model(model_path)
        self.vocab_size = self._pieces.get_piece_size()
        self.eod = self._pieces.eos_id()
        if self.eod < 0:
            raise ValueError(
                f"--tokenizer-model {model_path} has no end-of-sentence piece to end documents with; "
                "use --tokenizer-type SentencePieceTokenizer, which adds one."
            )

    def tokenize(self, text: str) -> list[int]:
        return self._pieces.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        return self._pieces.decode(list(ids))


class SentencePieceTokenizer:
    """A SentencePiece model with Megatron's added pieces behind its own ids; <EOD> ends a document.

    Text that spells an added piece is text: only `eod` gives that id.
    """

    def __init__(self, model_path: str) -> None:
        self._pieces = _load_model(model_path)
        self._model_size = self._pieces.get_piece_size()
        self._added = self._missing_pieces()
        self.vocab_size = self._model_size + len(self._added)
        self.eod = self._id_of("<EOD>")

    def tokenize(self, text: str) -> list[int]:
        return self._pieces.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self.vocab_size)
        text, run = "", []
        for token in ids:
            if token < self._model_size:
                run.append(int(token))
                continue
            text += self._pieces.decode(run) + self._added[token - self._model_size]
            run = []
        return text + self._pieces.decode(run)

    def _missing_pieces(self) -> tuple[str, ...]:
        known = {self._pieces.id_to_piece(index) for index in range(self._model_size)}
        ends = ((self._pieces.pad_id(), "<PAD>"), (self._pieces.bos_id(), "<BOS>"), (self._pieces.eos_id(), "<EOS>"))
        wanted = [*ADDED_PIECES, *(piece for index, piece in ends if index < 0)]
        return tuple(piece for piece in wanted if piece not in known)

    def _id_of(self, piece: str) -> int:
        return self._model_size + self._added.index(piece) if piece in self._added else self._pieces.piece_to_id(piece)


class NullTokenizer:
    """No tokenizer: text is ids separated by spaces. As in Megatron Core of 2026, vocab_size ids with vocab_size - 1 as eod."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size} leaves no id; give 1 or more.")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError("--tokenizer-type NullTokenizer reads text of ids separated by spaces, for example 17 4 250.") from None
        _check_ids(ids, self.vocab_size)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


def build_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that --tokenizer-type, --tokenizer-model and --vocab-size describe; ValueError, naming the flag, where they do not."""
    if data.tokenizer_type == "NullTokenizer":
        if data.vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size, the number of ids.")
        return NullTokenizer(data.vocab_size)
    kinds: dict[str, Callable[[str], Tokenizer]] = {
        "GPTSentencePieceTokenizer": GPTSentencePieceTokenizer,
        "SentencePieceTokenizer": SentencePieceTokenizer,
    }
    if data.tokenizer_type not in kinds:
        raise ValueError(f"--tokenizer-type {data.tokenizer_type} is unknown; choose {', '.join(kinds)} or NullTokenizer.")
    if data.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {data.tokenizer_type} needs --tokenizer-model, a SentencePiece .model file.")
    tokenizer = kinds[data.tokenizer_type](data.tokenizer_model)
    if data.vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"--vocab-size {data.vocab_size} differs from the {tokenizer.vocab_size} ids of {data.tokenizer_type} with "
            f"--tokenizer-model {data.tokenizer_model}; leave --vocab-size out."
        )
    return tokenizer


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least vocab_size."""
    return -(-vocab_size // multiple) * multiple


def _load_model(path: str) -> sentencepiece.SentencePieceProcessor:
    if not os.path.isfile(path):
        raise ValueError(f"--tokenizer-model {path} does not exist on this machine; give a SentencePiece .model file.")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model ({error}); give a .model file.") from None


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"Token id {token} is outside of the vocabulary of {vocab_size} ids; check --vocab-size or --tokenizer-model.")
