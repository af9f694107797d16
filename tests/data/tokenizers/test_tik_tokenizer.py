import random
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from harness.trained_tokenizers import json_entries, tiktoken_lines, training_texts, write_gpt2_files

from megatron_zpp.data.tokenizers.gpt2 import BYTES, GPT2BPETokenizer
from megatron_zpp.data.tokenizers.tik import PATTERNS, TikTokenizer
from megatron_zpp.system.user_error import UserError

SPECIAL = 10


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """256 bytes and the merges of a trained tokenizer, in their order."""
    _, merges = write_gpt2_files(tmp_path_factory.mktemp("tik"), 600)
    pairs = [line.split() for line in Path(merges).read_text(encoding="utf-8").splitlines()[1:]]
    return [bytes([byte]) for byte in range(256)] + [bytes(BYTES[letter] for letter in a + b) for a, b in pairs]


@pytest.fixture(scope="module")
def paths(tokens: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "t.tiktoken").write_text(tiktoken_lines(tokens))
    (folder / "t.json").write_text(json_entries(tokens))
    return str(folder / "t.tiktoken"), str(folder / "t.json")


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The ranks of a word's tokens by definition: merge the neighbours of the lowest rank until no merge is possible."""
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_ids_are_those_of_the_definition_behind_the_special_ones(tokens: list[bytes], paths: tuple[str, str], pattern: str) -> None:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    cut = regex.compile(PATTERNS[pattern])
    tokenizers = [TikTokenizer(path, pattern, num_special_tokens=SPECIAL) for path in paths]
    for text in (*training_texts()[:3], "Don't 12345\r\n\r\n  xÀé漢🎉 //\n/ </s>"):
        expected = [SPECIAL + rank for word in cut.findall(text) for rank in merged(word.encode(), ranks)]
        for tokenizer in tokenizers:
            assert tokenizer.tokenize(text) == expected
            assert tokenizer.tokenize_batch([text, ""]).ids.tolist() == expected
            assert tokenizer.detokenize(expected) == text
            assert (tokenizer.vocab_size, tokenizer.eod) == (SPECIAL + len(tokens), 2)


def test_the_patterns_differ_where_megatrons_do(paths: tuple[str, str]) -> None:
    first, second = (regex.compile(PATTERNS[name]) for name in ("v1", "v2"))
    assert first.findall("aB1/\n") == ["aB", "1", "/\n"]
    assert second.findall("aB1/\n") == ["a", "B", "1", "/\n"]
    assert first.findall("\n\n\n") == ["\n\n\n"]
    assert second.findall("HTTPServer") == ["HTTPServer"]


def test_special_tokens_have_names_and_the_end_of_a_document_is_among_them(paths: tuple[str, str]) -> None:
    names = ("</s>", "<pad>", "<unk>", "<s>")
    tokenizer = TikTokenizer(paths[0], "v2", num_special_tokens=SPECIAL, special_tokens=names)
    assert tokenizer.eod == 0
    assert tokenizer.detokenize([0, 1, 4, *tokenizer.tokenize("x")]) == "</s><pad><SPECIAL_4>x"


def test_a_vocab_size_cuts_the_file(paths: tuple[str, str]) -> None:
    tokenizer = TikTokenizer(paths[0], "v2", num_special_tokens=SPECIAL, vocab_size=SPECIAL + 256)
    assert tokenizer.vocab_size == SPECIAL + 256
    assert tokenizer.tokenize("def") == [SPECIAL + byte for byte in b"def"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_special_tokens": 2}, "--tiktoken-num-special-tokens 2 has no room for the 3 special tokens"),
        ({"num_special_tokens": 9, "special_tokens": ("<s>",)}, "--tokenizer-special-tokens <s> must name <unk>, <s>, </s>"),
        ({"num_special_tokens": 9, "vocab_size": 100}, "--vocab-size 100 leaves no room for 256 bytes"),
    ],
)
def test_flags_that_leave_no_room_are_refused(paths: tuple[str, str], options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TikTokenizer(paths[0], "v1", **options)


@pytest.mark.parametrize("name", ["t.tiktoken", "t.json"])
def test_damaged_files_are_refused(tokens: list[bytes], tmp_path: Path, name: str) -> None:
    rng = random.Random(1)
    write = tiktoken_lines if name == "t.tiktoken" else json_entries
    for damaged in ("", "\xff", write(tokens[1:]), write(tokens[:200]), write([*tokens, tokens[0]]), write(tokens)[: rng.randrange(3000)]):
        (tmp_path / name).write_text(damaged, encoding="latin-1")
        with pytest.raises(UserError, match=f"--tokenizer-model {tmp_path}/{name}"):
            TikTokenizer(str(tmp_path / name), "v1", num_special_tokens=SPECIAL)
    for junk in (
        "junk",
        "YQ==\n",
        "YQ== x\n",
        "YQ== \u0661\n",
        '[{"rank": NaN, "token_bytes": "YQ=="}]',
        '[{"rank": "0"}]',
        "[[[]]]",
        "[" * 100_000,
    ):
        (tmp_path / name).write_text(junk, encoding="utf-8")
        with pytest.raises(UserError, match=f"--tokenizer-model {tmp_path}/{name}"):
            TikTokenizer(str(tmp_path / name), "v1", num_special_tokens=SPECIAL)
    with pytest.raises(UserError, match="--tokenizer-model nowhere does not exist"):
        TikTokenizer("nowhere", "v1", num_special_tokens=SPECIAL)


def test_gpt2_files_and_a_tiktoken_file_of_the_same_merges_agree_on_single_words(paths: tuple[str, str], tmp_path: Path) -> None:
    gpt2 = GPT2BPETokenizer(*write_gpt2_files(tmp_path, 600))
    tik = TikTokenizer(paths[0], "v2", num_special_tokens=SPECIAL)
    for word in ("default", "config", "x", "tokenizer"):
        assert gpt2.detokenize(gpt2.tokenize(word)) == tik.detokenize(tik.tokenize(word)) == word
        assert len(gpt2.tokenize(word)) == len(tik.tokenize(word))
