"""Megatron's tokenizers on a SentencePiece model: today's, and the two that --legacy-tokenizer chooses."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from megatron_zpp.data.tokenizers.batch_tokenizer import BatchTokenizer
from megatron_zpp.data.tokenizers.fast_encoder import HARD_TEXTS, FastEncoder, from_sentencepiece
from megatron_zpp.data.tokenizers.file_kinds import SENTENCEPIECE, naming_other_kind
from megatron_zpp.data.tokenizers.sentencepiece_model import SPACE, check_served
from megatron_zpp.data.tokenizers.served_text import WithoutSpellings
from megatron_zpp.data.tokenizers.token_ids import TokenizedTexts, check_ids, join_lists
from megatron_zpp.system.outside import VOCABULARY_BYTES, OutsideFile
from megatron_zpp.system.user_error import UserError

# In Megatron's order. Those that the model lacks get the ids after its last one.
ADDED_PIECES = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class PieceTokenizer(BatchTokenizer):
    """Encodes texts to the ids of a SentencePiece model."""

    package = "sentencepiece"

    def __init__(self, model_path: str) -> None:
        self._pieces = _load_model(model_path)

    def tokenize(self, text: str) -> list[int]:
        return self._pieces.encode(text)

    def _fast_encoder(self) -> FastEncoder:
        model = self._pieces.serialized_model_proto()
        encoder = FastEncoder(from_sentencepiece, model, WithoutSpellings(check_served(model, self._pieces)))
        vocabulary = "".join(self._pieces.id_to_piece(index) for index in range(self._pieces.get_piece_size()))
        encoder.check((*HARD_TEXTS, "", SPACE, vocabulary.replace("<", "")), self._pieces.encode)
        return encoder

    def _encode_slowly(self, texts: Sequence[str]) -> TokenizedTexts:
        # Without num_threads a batch would use all cores, also those of the other workers.
        return join_lists(self._pieces.encode(list(texts), num_threads=1))


class ModelTokenizer(PieceTokenizer):
    """The unchanged ids of a SentencePiece model. Its end-of-sentence piece ends a document.

    Today's Megatron has it for SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer.
    """

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.vocab_size = self._pieces.get_piece_size()
        self.eod = self._pieces.eos_id()
        if self.eod < 0:
            raise UserError(
                f"--tokenizer-model {model_path} has no end-of-sentence piece to end documents with; "
                "use --tokenizer-type SentencePieceTokenizer with --legacy-tokenizer, which adds one."
            )

    def detokenize(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocab_size)
        return self._pieces.decode(list(ids))


class BeginningTokenizer(ModelTokenizer):
    """Llama2Tokenizer of earlier generations: it puts the model's begin-of-sentence piece before every text, even an empty one."""

    bos: int

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.bos = self._pieces.bos_id()
        if self.bos < 0:
            raise UserError(
                f"--tokenizer-model {model_path} has no begin-of-sentence piece to begin documents with; "
                "leave out --legacy-tokenizer, without which none is needed."
            )

    def tokenize(self, text: str) -> list[int]:
        return [self.bos, *self._pieces.encode(text)]

    def tokenize_batch(self, texts: Sequence[str]) -> TokenizedTexts:
        ids, lengths = super().tokenize_batch(texts)
        return TokenizedTexts(np.insert(ids, np.cumsum(lengths) - lengths, self.bos), lengths + 1)


class AddingTokenizer(PieceTokenizer):
    """SentencePieceTokenizer of earlier generations: Megatron's added pieces come after the model's own ids. <EOD> ends a document.

    extra_ids: number of pieces <extra_id_0>, <extra_id_1>, ... that come last.
    The spelling of an added piece in a text is plain text; no text is encoded to its id.
    """

    def __init__(self, model_path: str, extra_ids: int = 0) -> None:
        super().__init__(model_path)
        self._model_size = self._pieces.get_piece_size()
        self._added = self._missing_pieces(extra_ids)
        self.vocab_size = self._model_size + len(self._added)
        self.eod = self._id_of("<EOD>")

    def detokenize(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.vocab_size)
        text, run = "", []
        for token in ids:
            if token < self._model_size:
                run.append(int(token))
                continue
            text += self._pieces.decode(run) + self._added[token - self._model_size]
            run = []
        return text + self._pieces.decode(run)

    def _missing_pieces(self, extra_ids: int) -> tuple[str, ...]:
        known = {self._pieces.id_to_piece(index) for index in range(self._model_size)}
        ends = ((self._pieces.pad_id(), "<PAD>"), (self._pieces.bos_id(), "<BOS>"), (self._pieces.eos_id(), "<EOS>"))
        wanted = [*ADDED_PIECES, *(piece for index, piece in ends if index < 0), *(f"<extra_id_{i}>" for i in range(extra_ids))]
        return tuple(piece for piece in wanted if piece not in known)

    def _id_of(self, piece: str) -> int:
        return self._model_size + self._added.index(piece) if piece in self._added else self._pieces.piece_to_id(piece)


def _load_model(path: str) -> sentencepiece.SentencePieceProcessor:
    file = OutsideFile(Path(path), f"--tokenizer-model {path}", "give a SentencePiece .model file.", most_bytes=VOCABULARY_BYTES)
    file.check_is_there()
    with naming_other_kind(file, SENTENCEPIECE):
        content = file.content()
        if not content:
            file.refuse("is empty")  # the package would take it for no model at all
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as error:
            file.refuse(f"is not a SentencePiece model ({error})")
