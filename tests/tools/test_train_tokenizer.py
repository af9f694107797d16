import re
from pathlib import Path

import pytest
from harness.places import ROOT
from harness.tool import run_tool, write_json_lines
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from train_tokenizer import train_model

from megatron_zpp.data.tokenizers.sentencepiece import AddingTokenizer, ModelTokenizer
from megatron_zpp.system.user_error import UserError

SOURCES = sorted((ROOT / "megatron_zpp" / "data").glob("*.py"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    return write_json_lines(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", [{"text": text} for text in texts])


@pytest.fixture(scope="module")
def model(corpus: Path) -> Path:
    done = run_tool("train_tokenizer", "--input", corpus, "--model-prefix", corpus.parent / "new" / "tok", "--vocab-size", 600)
    assert done.returncode == 0, done.stderr
    return corpus.parent / "new" / "tok.model"


def test_source_code_comes_back_unchanged_in_far_fewer_tokens_than_characters(model: Path) -> None:
    tokenizer = ModelTokenizer(str(model))
    assert tokenizer.vocab_size == 600
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    ids = [tokenizer.tokenize(text) for text in texts]
    assert [tokenizer.detokenize(document) for document in ids] == texts
    assert sum(map(len, ids)) < sum(map(len, texts)) / 2


# SentencePiece writes a space as U+2581, and halves of surrogate pairs are not text.
@given(text=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
def test_every_text_comes_back_unchanged(model: Path, text: str) -> None:
    for tokenizer in (ModelTokenizer(str(model)), AddingTokenizer(str(model))):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("text", ["\t\tx\n", "\n\n  x \n", " x", "x ", "  ", "\r\n", "\0", "\ufeffx", "<s></s><unk><0x0A>", "é漢🎉", ""])
def test_white_space_and_special_spellings_come_back_unchanged(model: Path, text: str) -> None:
    tokenizer = ModelTokenizer(str(model))
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("text", ["zebra " * 1000, "zebra" * 14_000, "zebra\u2585zebra", "zebra\tzebra"])
def test_long_lines_and_words_and_characters_that_the_trainer_reserves_are_trained_on(text: str) -> None:
    model = train_model(["some other words", text], vocab_size=274, model_type="bpe")
    pieces = SentencePieceProcessor(model_proto=model)
    assert pieces.piece_to_id("z") != pieces.unk_id()


def test_the_sizes_that_are_named_are_the_smallest_and_the_largest_that_train() -> None:
    texts = ["some words to count", "more words"]
    for refused, sign in ((20, 1), (100_000, -1)):
        with pytest.raises(UserError, match="this text") as error:
            train_model(texts, vocab_size=refused, model_type="bpe")
        limit = int(re.findall(r"at (?:least|most) (\d+) pieces", str(error.value))[0])
        train_model(texts, vocab_size=limit, model_type="bpe")
        with pytest.raises(UserError, match=f"at (least|most) {limit} pieces"):
            train_model(texts, vocab_size=limit - sign, model_type="bpe")


def test_training_again_gives_the_same_bytes(corpus: Path, model: Path, tmp_path: Path) -> None:
    run_tool("train_tokenizer", "--input", corpus, "--model-prefix", tmp_path / "again", "--vocab-size", 600)
    assert (tmp_path / "again.model").read_bytes() == model.read_bytes()


def test_a_long_corpus_is_thinned_out_evenly(corpus: Path, model: Path, tmp_path: Path) -> None:
    limit = corpus.stat().st_size / 2e6 + 0.001
    done = run_tool(
        "train_tokenizer", "--input", corpus, "--model-prefix", tmp_path / "half", "--vocab-size", 600, "--max-megabytes", limit
    )
    assert done.returncode == 0
    assert (tmp_path / "half.model").read_bytes() != model.read_bytes()


@pytest.mark.parametrize(
    ("line", "arguments", "message"),
    [
        ("{", (), "line 2: not JSON ("),
        ('{"body": "x"}', (), 'line 2: key "text" is missing (found: body); --json-key names'),
        ('{"text": "x"}', ("--vocab-size", 100_000), "--vocab-size 100000 is too large: this text allows at most "),
        ('{"text": "x"}', ("--vocab-size", 20), "--vocab-size 20 is too small: this text needs at least 272 pieces."),
        ('{"text": "x"}', ("--max-megabytes", 0), "--max-megabytes: 0 is not a number of megabytes"),
    ],
)
def test_unusable_input_is_refused_and_leaves_no_model(tmp_path: Path, line: str, arguments: tuple[object, ...], message: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"text": "some words to count"}}\n{line}\n')
    done = run_tool("train_tokenizer", "--input", source, "--model-prefix", tmp_path / "tok", *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("train_tokenizer.py: error: ")
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_text_without_content_is_refused(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": ""}, {"text": "\n\t\n"}])
    done = run_tool("train_tokenizer", "--input", source, "--model-prefix", tmp_path / "tok")
    assert done.returncode == 2
    assert f"--input {source} holds no text under --json-key text; give the key that holds it." in done.stderr


def test_a_missing_input_is_refused(tmp_path: Path) -> None:
    done = run_tool("train_tokenizer", "--input", "nowhere.jsonl", "--model-prefix", tmp_path / "tok")
    assert done.returncode == 2
    assert "--input nowhere.jsonl is not a file, a folder or a glob" in done.stderr
