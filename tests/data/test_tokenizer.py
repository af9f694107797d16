import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.sentencepiece_tokenizer import GPTSentencePieceTokenizer, SentencePieceTokenizer
from megatron_zpp.data.tokenizer import NullTokenizer, build_tokenizer, padded_vocab_size

MODEL_SIZE = 300


def write_model(path: Path, **options: Any) -> str:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["def f(x): return x", "the quick brown fox jumps over the lazy dog"] * 5),
        model_writer=model,
        vocab_size=MODEL_SIZE,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.model")


def test_gpt_sentencepiece_ends_documents_with_the_models_own_end(model_path: str) -> None:
    tokenizer = GPTSentencePieceTokenizer(model_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (MODEL_SIZE, 2)
    assert tokenizer.detokenize(tokenizer.tokenize("return x\n")) == "return x\n"


def test_sentencepiece_adds_megatrons_pieces_behind_the_model(model_path: str) -> None:
    tokenizer = SentencePieceTokenizer(model_path)
    # <CLS>, <SEP>, <EOD>, <MASK>, and <PAD>, which this model lacks; it has its own sentence ends.
    assert (tokenizer.vocab_size, tokenizer.eod) == (MODEL_SIZE + 5, MODEL_SIZE + 2)
    ids = [*tokenizer.tokenize("fox"), tokenizer.eod, *tokenizer.tokenize(" dog")]
    assert tokenizer.detokenize(ids) == "fox<EOD> dog"


def test_pieces_the_model_has_are_not_added_again(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(write_model(tmp_path / "own.model", control_symbols=["<EOD>"], pad_id=3))
    assert (tokenizer.vocab_size, tokenizer.eod) == (MODEL_SIZE + 3, 4)


def test_text_that_spells_the_end_of_a_document_is_text(model_path: str) -> None:
    for tokenizer in (SentencePieceTokenizer(model_path), GPTSentencePieceTokenizer(model_path)):
        for text in ("<EOD>", "</s>", "<0x0A>"):
            assert tokenizer.eod not in tokenizer.tokenize(text)
            assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_a_model_without_sentence_end_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    path = write_model(tmp_path / "endless.model", eos_id=-1)
    with pytest.raises(ValueError, match="--tokenizer-model .* no end-of-sentence piece"):
        GPTSentencePieceTokenizer(path)
    assert SentencePieceTokenizer(path).vocab_size == MODEL_SIZE + 6


def test_tokenizers_can_be_sent_to_other_processes(model_path: str) -> None:
    for tokenizer in (SentencePieceTokenizer(model_path), GPTSentencePieceTokenizer(model_path)):
        sent = pickle.loads(pickle.dumps(tokenizer))
        assert (sent.eod, sent.tokenize("fox")) == (tokenizer.eod, tokenizer.tokenize("fox"))


def test_null_tokenizer_reads_ids_and_ends_documents_with_the_last_one() -> None:
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    assert tokenizer.tokenize("3  1\n9") == [3, 1, 9]
    assert tokenizer.detokenize([3, 1, 9]) == "3 1 9"


@pytest.mark.parametrize(("text", "message"), [("3 x", "NullTokenizer reads text of ids"), ("10", "id 10 .* 10 ids"), ("-1", "id -1")])
def test_null_tokenizer_refuses_other_text(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NullTokenizer(10).tokenize(text)


def test_ids_outside_of_the_vocabulary_are_not_text(model_path: str) -> None:
    for tokenizer in (SentencePieceTokenizer(model_path), GPTSentencePieceTokenizer(model_path)):
        with pytest.raises(ValueError, match=f"Token id {tokenizer.vocab_size} is outside"):
            tokenizer.detokenize([tokenizer.vocab_size])


@pytest.mark.parametrize("kind", [SentencePieceTokenizer, GPTSentencePieceTokenizer])
def test_build_tokenizer_builds_the_named_kind(model_path: str, kind: type) -> None:
    assert type(build_tokenizer(DataConfig(tokenizer_type=kind.__name__, tokenizer_model=model_path))) is kind
    assert build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=7)).vocab_size == 7


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(), "--tokenizer-type None is unknown"),
        (DataConfig(tokenizer_type="NullTokenizer"), "needs --vocab-size"),
        (DataConfig(tokenizer_type="NullTokenizer", vocab_size=0), "--vocab-size 0"),
        (DataConfig(tokenizer_type="SentencePieceTokenizer"), "needs --tokenizer-model"),
        (
            DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model="nowhere.model"),
            "--tokenizer-model nowhere.model does not",
        ),
        (DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=__file__), "is not a SentencePiece model"),
    ],
)
def test_flags_that_describe_no_tokenizer_are_refused(data: DataConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(data)


def test_a_vocab_size_that_contradicts_the_model_is_refused(model_path: str) -> None:
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model_path, vocab_size=301)
    with pytest.raises(ValueError, match="--vocab-size 301 differs from the 300 ids"):
        build_tokenizer(data)


@given(vocab_size=st.integers(1, 10**6), multiple=st.integers(1, 4096))
def test_padded_vocab_size_is_the_next_multiple(vocab_size: int, multiple: int) -> None:
    padded = padded_vocab_size(vocab_size, multiple)
    assert padded % multiple == 0
    assert padded - multiple < vocab_size <= padded


def test_megatrons_padding_of_gpt2() -> None:
    assert padded_vocab_size(50257, 128) == 50304


def test_reading_writing_and_tokenizing_import_no_torch() -> None:
    rooms = "indexed_dataset, tokenizer, split, statistics, gpt_dataset, sampler, datasets"
    code = f"import sys; from megatron_zpp.data import {rooms}; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
