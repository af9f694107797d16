"""Tokenizer files of each kind, trained on a few sources, for tests without a network."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import ByteLevelBPETokenizer

SOURCES = sorted((Path(__file__).resolve().parents[2] / "megatron_zpp" / "config").glob("*.py"))
END_OF_TEXT = "<|endoftext|>"
MODEL_SIZE = 300  # pieces of a SentencePiece model


def training_texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in SOURCES]


def write_gpt2_files(folder: Path, vocab_size: int = 700, texts: Sequence[str] = ()) -> tuple[str, str]:
    """vocab.json and merges.txt, with <|endoftext|> as the last id, where GPT-2 has it."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts or training_texts(), vocab_size=vocab_size - 1, show_progress=False)
    trained.add_special_tokens([END_OF_TEXT])
    trained.save_model(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary[END_OF_TEXT] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def tiktoken_lines(tokens: Sequence[bytes]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


def json_entries(tokens: Sequence[bytes]) -> str:
    """As Megatron reads them."""
    return json.dumps(
        [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
            for rank, token in enumerate(tokens)
        ]
    )


def write_sentencepiece_model(path: Path, **options: Any) -> str:
    """A BPE model of MODEL_SIZE pieces that changes no text; 1 and 2 are its begin and end of sentence. options: replace those here."""
    model = io.BytesIO()
    plain = {
        "model_type": "bpe",
        "vocab_size": MODEL_SIZE,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["def f(x): return x", "the quick brown fox jumps over the lazy dog"] * 5),
        model_writer=model,
        minloglevel=2,
        **{**plain, **options},
    )
    path.write_bytes(model.getvalue())
    return str(path)
