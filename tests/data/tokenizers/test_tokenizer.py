import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
from harness.places import ROOT
from harness.trained_tokenizers import MODEL_SIZE, tiktoken_lines, write_gpt2_files, write_sentencepiece_model
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from megatron_zpp.config.schema import DataConfig, ModelConfig
from megatron_zpp.data.tokenizers.sentencepiece import AddingTokenizer, BeginningTokenizer, ModelTokenizer
from megatron_zpp.data.tokenizers.tokenizer import NullTokenizer, build_tokenizer, embedding_rows, padded_vocab_size
from megatron_zpp.system.user_error import UserError


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentencepiece_model(tmp_path_factory.mktemp("model") / "tiny.model")


def test_sentencepiece_ends_documents_with_the_models_own_end(model_path: str) -> None:
    tokenizer = ModelTokenizer(model_path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (MODEL_SIZE, 2)
    assert tokenizer.detokenize(tokenizer.tokenize("return x\n")) == "return x\n"


def test_the_earlier_llama_2_begins_every_text_with_its_own_piece(model_path: str) -> None:
    plain, llama = ModelTokenizer(model_path), BeginningTokenizer(model_path)
    assert (llama.vocab_size, llama.eod, llama.bos) == (MODEL_SIZE, 2, 1)
    assert llama.tokenize("the fox") == [1, *plain.tokenize("the fox")]
    assert llama.tokenize_batch(["", "fox"]).ids.tolist() == [1, 1, *plain.tokenize("fox")]
    assert llama.detokenize(llama.tokenize("the fox")) == "the fox"


def test_a_batch_has_the_ids_of_its_texts(model_path: str) -> None:
    texts = ["the fox", "", " x\t<EOD>é漢", "dog " * 500]
    for tokenizer in (AddingTokenizer(model_path), ModelTokenizer(model_path), BeginningTokenizer(model_path)):
        ids, lengths = tokenizer.tokenize_batch(texts)
        expected = [tokenizer.tokenize(text) for text in texts]
        assert ids.tolist() == [token for members in expected for token in members]
        assert lengths.tolist() == [len(members) for members in expected]
        assert tokenizer.tokenize_batch([]).ids.tolist() == []
    assert NullTokenizer(10).tokenize_batch(["1 2", "", "3"]).lengths.tolist() == [2, 0, 1]


def test_extra_ids_are_the_last_pieces(model_path: str) -> None:
    tokenizer = AddingTokenizer(model_path, extra_ids=2)
    assert tokenizer.vocab_size == MODEL_SIZE + 7
    assert tokenizer.detokenize([tokenizer.vocab_size - 1]) == "<extra_id_1>"


def test_the_earlier_sentencepiece_adds_megatrons_pieces_behind_the_model(model_path: str) -> None:
    tokenizer = AddingTokenizer(model_path)
    # <CLS>, <SEP>, <EOD>, <MASK>, and <PAD>, which this model lacks; it has its own sentence ends.
    assert (tokenizer.vocab_size, tokenizer.eod) == (MODEL_SIZE + 5, MODEL_SIZE + 2)
    ids = [*tokenizer.tokenize("fox"), tokenizer.eod, *tokenizer.tokenize(" dog")]
    assert tokenizer.detokenize(ids) == "fox<EOD> dog"


def test_pieces_the_model_has_are_not_added_again(tmp_path: Path) -> None:
    tokenizer = AddingTokenizer(write_sentencepiece_model(tmp_path / "own.model", control_symbols=["<EOD>"], pad_id=3))
    assert (tokenizer.vocab_size, tokenizer.eod) == (MODEL_SIZE + 3, 4)


def test_text_that_spells_the_end_of_a_document_is_text(model_path: str) -> None:
    for tokenizer in (AddingTokenizer(model_path), ModelTokenizer(model_path)):
        for text in ("<EOD>", "</s>", "<0x0A>"):
            assert tokenizer.eod not in tokenizer.tokenize(text)
            assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_a_model_without_sentence_end_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    path = write_sentencepiece_model(tmp_path / "endless.model", eos_id=-1)
    with pytest.raises(UserError, match="--tokenizer-model .* no end-of-sentence piece"):
        ModelTokenizer(path)
    with pytest.raises(UserError, match="--tokenizer-model .* no begin-of-sentence piece"):
        BeginningTokenizer(write_sentencepiece_model(tmp_path / "beginless.model", bos_id=-1))
    assert AddingTokenizer(path).vocab_size == MODEL_SIZE + 6


def test_tokenizers_can_be_sent_to_other_processes(model_path: str) -> None:
    for tokenizer in (AddingTokenizer(model_path), ModelTokenizer(model_path)):
        sent = pickle.loads(pickle.dumps(tokenizer))
        assert (sent.eod, sent.tokenize("fox")) == (tokenizer.eod, tokenizer.tokenize("fox"))


def test_null_tokenizer_reads_ids_and_ends_documents_with_the_last_one() -> None:
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    assert tokenizer.tokenize("3  1\n9") == [3, 1, 9]
    assert tokenizer.detokenize([3, 1, 9]) == "3 1 9"


@pytest.mark.parametrize(("text", "message"), [("3 x", "NullTokenizer reads text of ids"), ("10", "id 10 .* 10 ids"), ("-1", "id -1")])
def test_null_tokenizer_refuses_other_text(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        NullTokenizer(10).tokenize(text)


def test_ids_outside_of_the_vocabulary_are_not_text(model_path: str) -> None:
    for tokenizer in (AddingTokenizer(model_path), ModelTokenizer(model_path)):
        with pytest.raises(UserError, match=f"Token id {tokenizer.vocab_size} is outside"):
            tokenizer.detokenize([tokenizer.vocab_size])


@pytest.mark.parametrize(
    ("name", "earlier"),
    [
        ("SentencePieceTokenizer", AddingTokenizer),
        ("GPTSentencePieceTokenizer", ModelTokenizer),
        ("Llama2Tokenizer", BeginningTokenizer),
    ],
)
def test_kinds_keep_the_ids_of_the_model_unless_legacy_tokenizer_is_given(model_path: str, name: str, earlier: type) -> None:
    data = DataConfig(tokenizer_type=name, tokenizer_model=model_path)
    today, before = build_tokenizer(data), build_tokenizer(replace(data, legacy_tokenizer=True))
    assert (type(today), type(before)) == (ModelTokenizer, earlier)
    pieces = sentencepiece.SentencePieceProcessor(model_file=model_path)
    assert (today.vocab_size, today.eod) == (pieces.get_piece_size(), pieces.eos_id())
    assert today.tokenize("the fox") == pieces.encode("the fox")


def test_build_tokenizer_builds_a_null_tokenizer() -> None:
    assert build_tokenizer(DataConfig(tokenizer_type="NullTokenizer", vocab_size=7)).vocab_size == 7


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(), "--tokenizer-type must be given; choose"),
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
    with pytest.raises(UserError, match=message):
        build_tokenizer(data)


def test_every_kind_is_built_from_its_own_flags(tmp_path: Path) -> None:
    vocab_file, merge_file = write_gpt2_files(tmp_path, 300)
    gpt2 = build_tokenizer(DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file, vocab_size=300))
    assert gpt2.eod == 299
    ByteLevelBPETokenizer(vocab_file, merge_file).save(str(tmp_path / "tokenizer.json"))
    for name in ("HuggingFaceTokenizer", "HFTokenizer"):
        assert build_tokenizer(DataConfig(tokenizer_type=name, tokenizer_model=str(tmp_path))).tokenize("x y") == gpt2.tokenize("x y")
    (tmp_path / "bytes.tiktoken").write_text(tiktoken_lines([bytes([byte]) for byte in range(256)]))
    data = DataConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "bytes.tiktoken"), tiktoken_num_special_tokens=5)
    assert build_tokenizer(replace(data, tiktoken_pattern="v2")).tokenize("A") == [5 + 65]
    with pytest.raises(UserError, match="TikTokenizer needs --tiktoken-pattern"):
        build_tokenizer(data)
    with pytest.raises(UserError, match="GPT2BPETokenizer needs --vocab-file .* and --merge-file"):
        build_tokenizer(DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab_file))


def test_a_vocab_size_that_contradicts_the_model_is_refused(model_path: str) -> None:
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model_path, vocab_size=301)
    with pytest.raises(UserError, match="--vocab-size 301 differs from the 300 ids"):
        build_tokenizer(data)


@given(vocab_size=st.integers(1, 10**6), multiple=st.integers(1, 4096))
def test_padded_vocab_size_is_the_next_multiple(vocab_size: int, multiple: int) -> None:
    padded = padded_vocab_size(vocab_size, multiple)
    assert padded % multiple == 0
    assert padded - multiple < vocab_size <= padded


def test_megatrons_padding_of_gpt2() -> None:
    assert padded_vocab_size(50257, 128) == 50304


def test_reading_writing_and_tokenizing_import_no_torch() -> None:
    rooms = "indexed_dataset, tokenizers.tokenizer, split, statistics, gpt_dataset, sampler, datasets"
    imports = ", ".join(f"megatron_zpp.data.{room}" for room in rooms.split(", "))
    code = f"import sys; import {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_embedding_has_the_rows_that_are_asked_for_else_the_next_multiple():
    model = ModelConfig(make_vocab_size_divisible_by=128)
    assert embedding_rows(model, 50257) == 50304
    assert embedding_rows(replace(model, padded_vocab_size=50257), 50257) == 50257
    with pytest.raises(UserError, match="--padded-vocab-size 50000 is below the 50257 ids of the tokenizer; choose 50257 or more"):
        embedding_rows(replace(model, padded_vocab_size=50000), 50257)


@pytest.mark.parametrize(
    ("make", "finding"),
    [
        (os.mkfifo, r"cannot be read \(it is a pipe, not a regular file\)"),
        (lambda path: path.symlink_to("/dev/zero"), r"cannot be read \(it is a device, not a regular file\)"),
        (Path.mkdir, r"cannot be read \(Is a directory\)"),
        (Path.touch, "is empty"),
        (lambda path: path.write_bytes(b"\x0a\xff\xff\xff"), "is not a SentencePiece model"),
    ],
)
def test_what_is_not_a_sentencepiece_model_is_said_as_it_is(tmp_path: Path, make: Callable[[Path], object], finding: str) -> None:
    make(tmp_path / "a.model")
    with pytest.raises(UserError, match=f"--tokenizer-model {tmp_path}/a.model {finding}.*; give a SentencePiece .model file"):
        build_tokenizer(DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "a.model")))
