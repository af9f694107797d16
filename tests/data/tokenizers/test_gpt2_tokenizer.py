import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import regex
from harness.trained_tokenizers import training_texts, write_gpt2_files
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer

from megatron_zpp.data.tokenizers.gpt2 import GPT2BPETokenizer
from megatron_zpp.system.user_error import UserError

VOCAB_SIZE = 700
TEXTS = [
    "",
    " ",
    "\n\n  x\t\ty  \n",
    "don't we'LL I'd",
    "x = 10_000 ** -3.5",
    "é漢字🎉 \u200b\ufeff",
    "<|endoftext|>",
    "\0\x1c \x85\xa0",
    "a" * 5000,
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_gpt2_files(tmp_path_factory.mktemp("gpt2"), VOCAB_SIZE)


@pytest.fixture(scope="module")
def tokenizer(files: tuple[str, str]) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*files)


@pytest.fixture(scope="module")
def independent(files: tuple[str, str]) -> ByteLevelBPETokenizer:
    """Package tokenizers' own implementation, from the same files."""
    return ByteLevelBPETokenizer(*files)


def test_ids_are_those_of_an_independent_implementation(tokenizer: GPT2BPETokenizer, independent: ByteLevelBPETokenizer) -> None:
    texts = [*TEXTS, *training_texts()]
    batch = tokenizer.tokenize_batch(texts)
    expected = [independent.encode(text).ids for text in texts]
    assert [tokenizer.tokenize(text) for text in texts] == expected
    assert batch.lengths.tolist() == [len(ids) for ids in expected]
    assert batch.ids.tolist() == [token for ids in expected for token in ids]
    assert batch.ids.dtype == np.int32


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t'sedlx1")))
def test_any_text_has_the_ids_of_an_independent_implementation_and_comes_back(
    tokenizer: GPT2BPETokenizer, independent: ByteLevelBPETokenizer, text: str
) -> None:
    ids = tokenizer.tokenize(text)
    assert ids == independent.encode(text).ids
    assert tokenizer.detokenize(ids) == text


def test_the_end_of_a_document_is_an_id_that_no_text_gives(tokenizer: GPT2BPETokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eod) == (VOCAB_SIZE, VOCAB_SIZE - 1)
    assert tokenizer.eod not in tokenizer.tokenize("<|endoftext|>")
    assert tokenizer.detokenize([*tokenizer.tokenize("x"), tokenizer.eod]) == "x<|endoftext|>"
    with pytest.raises(UserError, match=f"Token id {VOCAB_SIZE} is outside"):
        tokenizer.detokenize([VOCAB_SIZE])


def test_ids_follow_vocab_json_whatever_its_order(files: tuple[str, str], tokenizer: GPT2BPETokenizer, tmp_path: Path) -> None:
    vocabulary = json.loads(Path(files[0]).read_text())
    (tmp_path / "vocab.json").write_text(json.dumps({token: VOCAB_SIZE - 1 - token_id for token, token_id in vocabulary.items()}))
    reversed_ids = GPT2BPETokenizer(str(tmp_path / "vocab.json"), files[1])
    text = training_texts()[0]
    assert reversed_ids.tokenize(text) == [VOCAB_SIZE - 1 - token for token in tokenizer.tokenize(text)]
    assert reversed_ids.eod == 0
    assert reversed_ids.detokenize(reversed_ids.tokenize(text)) == text


def test_a_run_of_white_space_too_long_for_tiktoken_has_the_ids_of_its_words(tokenizer: GPT2BPETokenizer) -> None:
    """Reference: package regex splits by GPT-2's pattern, and each word is tokenised alone."""
    text = "a" + " \u2003\n" * 400_000 + " b \x1c" + "\t" * 1_100_000 + "c" + " " * 200_000
    pattern = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    assert tokenizer.tokenize(text) == [token for word in pattern.findall(text) for token in tokenizer.tokenize(word)]


def test_it_can_be_sent_to_other_processes(tokenizer: GPT2BPETokenizer) -> None:
    sent = pickle.loads(pickle.dumps(tokenizer))
    assert (sent.eod, sent.vocab_size, sent.tokenize("def f(x):")) == (tokenizer.eod, VOCAB_SIZE, tokenizer.tokenize("def f(x):"))


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        (None, "", "--vocab-file nowhere does not exist"),
        ("{", "", "is not JSON"),
        ('{"a": "b"}', "", 'a must be an id, a whole number from 0 to 2147483647, not "b"'),
        ("[" * 100_000, "", "is nested more than 64 levels deep"),
        ('{"a": 2147483648}', "", "a must be an id, a whole number from 0 to 2147483647, not 2147483648"),
        ('{"a": 0, "b": 0}', "", "gives one id to two tokens"),
        ('{"a": 0}', "", "has no <|endoftext|>"),
        ('{"<|endoftext|>": 0}', "a b c\n", "line 1: 'a b c' is not two tokens"),
        ('{"<|endoftext|>": 0}', "#version: 0.2\na b\na b\n", "makes one token by two merges"),
        ('{"<|endoftext|>": 0}', "#version: 0.2\na b\n", "lacks '\u0100', which --merge-file"),
    ],
)
def test_files_that_are_no_gpt2_tokenizer_are_refused(tmp_path: Path, vocabulary: str | None, merges: str, message: str) -> None:
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    if vocabulary is not None:
        (tmp_path / "vocab.json").write_text(vocabulary)
    with pytest.raises(UserError, match=re.escape(message)):
        GPT2BPETokenizer("nowhere" if vocabulary is None else str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
