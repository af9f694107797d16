"""A file of one tokenizer that is given to another one is named, with the flags that read it."""

import json
from pathlib import Path

import pytest
from harness.trained_tokenizers import tiktoken_lines, write_gpt2_files, write_sentencepiece_model
from tokenizers import ByteLevelBPETokenizer

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer
from megatron_zpp.system.user_error import UserError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 499723\n"
# Of each file: what it is, and what to do about it.
KINDS = {
    "tiny.model": ("a SentencePiece model", "give --tokenizer-type SentencePieceTokenizer --tokenizer-model {}."),
    "tokenizer.json": ("a tokenizer.json", "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model {}."),
    "vocab.json": ("a vocab.json", "give --tokenizer-type GPT2BPETokenizer --vocab-file {}, and --merge-file."),
    "merges.txt": ("a merges.txt", "give --tokenizer-type GPT2BPETokenizer --merge-file {}, and --vocab-file."),
    "ranks.tiktoken": ("a list of ranked tokens", "give --tokenizer-type TikTokenizer --tokenizer-model {}."),
    "ranks.json": ("a list of ranked tokens", "give --tokenizer-type TikTokenizer --tokenizer-model {}."),
    "tokenizer_config.json": ("a file of settings", "give the tokenizer.json or the SentencePiece model that it belongs to."),
    "pointer": ("a pointer of Git LFS", "fetch the file itself, with git lfs pull."),
    "page": ("a web page", "download the file itself."),
}
# Of each tokenizer: the flag of the file, and those of its own kind.
READERS = {
    "HuggingFaceTokenizer": ("tokenizer_model", {"tokenizer.json"}),
    "SentencePieceTokenizer": ("tokenizer_model", {"tiny.model"}),
    "TikTokenizer": ("tokenizer_model", {"ranks.tiktoken", "ranks.json"}),
    "GPT2BPETokenizer vocab": ("vocab_file", {"vocab.json"}),
    "GPT2BPETokenizer merges": ("merge_file", {"merges.txt"}),
}
CROSSED = [(reader, name) for reader, (_, own) in READERS.items() for name in KINDS if name not in own]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    write_sentencepiece_model(folder / "tiny.model")
    write_gpt2_files(folder, 300)
    ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save(str(folder / "tokenizer.json"))
    (folder / "ranks.tiktoken").write_text(tiktoken_lines([bytes([byte]) for byte in range(256)]))
    (folder / "ranks.json").write_text(json.dumps([{"rank": 0, "token_bytes": "AA==", "token_str": ""}]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (folder / "pointer").write_text(POINTER)
    (folder / "page").write_text("\n<!DOCTYPE html><title>404</title>")
    return folder


def refusal(folder: Path, reader: str, path: Path) -> str:
    flag, _ = READERS[reader]
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")} | {flag: str(path)}
    with pytest.raises(UserError, match="^--") as error:
        build_tokenizer(DataConfig(tokenizer_type=reader.split()[0], tiktoken_pattern="v2", **files))
    return str(error.value)


@pytest.mark.parametrize(("reader", "name"), CROSSED)
def test_a_file_of_another_tokenizer_is_named_with_the_flags_that_read_it(folder: Path, reader: str, name: str) -> None:
    kind, remedy = KINDS[name]
    flag = READERS[reader][0].replace("_", "-")
    assert refusal(folder, reader, folder / name) == f"--{flag} {folder / name} is {kind}; {remedy.format(folder / name)}"


@pytest.mark.parametrize("reader", ["HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer"])
def test_a_folder_that_holds_another_tokenizer_is_refused_with_the_file_to_give(folder: Path, tmp_path: Path, reader: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes((folder / "tiny.model").read_bytes())
    expected = (
        f"is a folder with a SentencePiece model; give --tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path}/tokenizer.m"
    )
    assert expected in refusal(folder, reader, tmp_path)


def test_a_file_that_is_of_no_kind_keeps_the_error_of_its_reader(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("one two three\n")
    for reader in ("HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer", "GPT2BPETokenizer merges"):
        assert " is not " in refusal(folder, reader, tmp_path / "notes.txt")


@pytest.mark.parametrize("reader", [reader for reader in READERS if reader != "HuggingFaceTokenizer"])
def test_a_missing_file_is_refused_with_the_name_of_the_file_that_was_meant(folder: Path, reader: str) -> None:
    name = min(READERS[reader][1])
    missing = folder / f"{name[0]}{name[2:]}"
    assert f"{missing} does not exist on this machine (did you mean {folder / name}?); " in refusal(folder, reader, missing)
