import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from harness.cut_tokenizers import cut_tokenizer
from harness.trained_tokenizers import training_texts, write_gpt2_files
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.processors import TemplateProcessing

from megatron_zpp.data.tokenizers.gpt2 import GPT2BPETokenizer
from megatron_zpp.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_zpp.system.user_error import UserError

VOCAB_SIZE = 600


def write_tokenizer(folder: Path, *, ends: tuple[str, ...] = ("<|endoftext|>",), begins: bool = False) -> tuple[str, str]:
    """Writes tokenizer.json into the folder, and returns the vocab.json and merges.txt that it was made from."""
    files = write_gpt2_files(folder, VOCAB_SIZE)
    trained = ByteLevelBPETokenizer(*files)
    trained.add_special_tokens(list(ends))
    trained.enable_truncation(5)
    trained.enable_padding(length=50)
    trained.save(str(folder / "tokenizer.json"))
    if begins:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
        tokenizer.save(str(folder / "tokenizer.json"))
    return files


def test_ids_are_those_of_the_same_merges_by_tiktoken_without_cutting_or_padding(tmp_path: Path) -> None:
    reference = GPT2BPETokenizer(*write_tokenizer(tmp_path))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = HuggingFaceTokenizer(str(path))
        assert (tokenizer.vocab_size, tokenizer.eod) == (VOCAB_SIZE, reference.eod)
        texts = [*training_texts(), ""]
        expected = [reference.tokenize(text) for text in texts]
        batch = tokenizer.tokenize_batch(texts)
        assert [tokenizer.tokenize(text) for text in texts] == expected
        assert (batch.ids.tolist(), batch.lengths.tolist()) == ([i for ids in expected for i in ids], [len(ids) for ids in expected])
        assert tokenizer.detokenize(expected[0]) == texts[0]
    assert pickle.loads(pickle.dumps(tokenizer)).tokenize("x y") == tokenizer.tokenize("x y")


def test_its_own_rules_put_a_beginning_before_every_text(tmp_path: Path) -> None:
    reference = GPT2BPETokenizer(*write_tokenizer(tmp_path, begins=True))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert tokenizer.tokenize("x y") == [VOCAB_SIZE, *reference.tokenize("x y")]
    assert tokenizer.tokenize_batch(["", "x"]).lengths.tolist() == [1, 2]
    plain = HuggingFaceTokenizer(str(tmp_path), adds_special_tokens=False)
    assert plain.tokenize("x y") == plain.tokenize_batch(["x y"]).ids.tolist() == reference.tokenize("x y")


def test_added_tokens_count_into_the_vocabulary(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ends=("<|endoftext|>", "<eos>"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eod) == (VOCAB_SIZE + 1, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"does not say which token ends a document \(it has <\|endoftext\|> and <eos>\); put a tokenizer_config.json"),
        ("{}", "does not say which token ends a document"),
        ("{", "tokenizer_config.json is not JSON"),
        ('{"eos_token": "<end>"}', "names '<end>' as eos_token, which .* does not have"),
    ],
)
def test_an_end_of_documents_that_is_not_said_or_not_there_is_refused(tmp_path: Path, config: str | None, message: str) -> None:
    write_tokenizer(tmp_path, ends=("<|endoftext|>", "<eos>"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(UserError, match=message):
        HuggingFaceTokenizer(str(tmp_path))


def test_what_is_no_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no tokenizer.json on this machine, and nothing is downloaded"):
        HuggingFaceTokenizer("organisation/model")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        HuggingFaceTokenizer(str(tmp_path))


def test_a_tokenizer_json_on_which_the_package_panics_and_one_that_is_a_pipe_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        HuggingFaceTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="tokenizer.json cannot be read .it is a pipe, not a regular file"):
        HuggingFaceTokenizer(str(tmp_path))


def test_no_limit_of_length_spelled_as_an_enormous_number_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ends=("<|endoftext|>", "<eos>"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30, "eos_token": "<eos>"}))
    assert HuggingFaceTokenizer(str(tmp_path)).detokenize([HuggingFaceTokenizer(str(tmp_path)).eod]) == "<eos>"


NEXT_ID = len(cut_tokenizer()["model"]["vocab"]) + 1


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


CONFIG, MAP, NUMBERED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FILES: dict[str, dict[str, Any]] = {
    "added_tokens.json": {NUMBERED: {"<b>": NEXT_ID + 1, "<a>": NEXT_ID}},
    "added_tokens.json with a special one": {NUMBERED: {"<a>": NEXT_ID}, MAP: {"sep_token": "<a>"}},
    "added_tokens_decoder": {
        CONFIG: {"added_tokens_decoder": {str(NEXT_ID + 1): token("word", normalized=True), str(NEXT_ID): token("<a>", lstrip=True)}},
        MAP: {"pad_token": "<pad>"},
    },
    "a list": {CONFIG: {"extra_special_tokens": ["<b>", "<a>"], "additional_special_tokens": ["<c>"]}},
    "the older list": {CONFIG: {"additional_special_tokens": ["<b>", {"__type": "AddedToken", **token("<a>", rstrip=True)}]}},
    "an object": {CONFIG: {"extra_special_tokens": {"image_token": "<b>", "sound_token": "<a>"}}},
    "lists in the map": {MAP: {"additional_special_tokens": ["<b>", "<a>"], "pad_token": token("<pad>")}},
    "objects in the map": {MAP: {"extra_special_tokens": [token("<b>")], "bos_token": token("<a>", lstrip=True)}},
    "names": {CONFIG: {"pad_token": "<pad>", "image_token": "<c>", "bos_token": "<a>", "unk_token": "<b>", "add_bos_token": True}},
    "a list in both": {CONFIG: {"additional_special_tokens": ["<b>"]}, MAP: {"additional_special_tokens": ["<a>"]}},
    "a list in the map beside an empty one": {CONFIG: {"extra_special_tokens": []}, MAP: {"additional_special_tokens": ["<a>"]}},
    "both lists in the map": {CONFIG: {"extra_special_tokens": ["<b>"]}, MAP: {"extra_special_tokens": [token("<a>")]}},
    "a name of an ordinary token": {CONFIG: {"pad_token": "aA"}},
    "plain names": {CONFIG: {"extra_special_tokens": ["<a>"], "split_special_tokens": True}, NUMBERED: {"<b>": NEXT_ID}},
}


def write_beside(folder: Path, files: dict[str, Any]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(cut_tokenizer()))
    for name, content in {CONFIG: {}, **files}.items():
        kept = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"} if name == CONFIG else {}
        (folder / name).write_text(json.dumps({**kept, **content}))


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_tokens_that_only_the_files_beside_name_have_the_ids_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    write_beside(tmp_path, files)
    ours, theirs = HuggingFaceTokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a <a> b", "<a>", "<b><a><c>", " <pad> <pad>x", "word words a word", "aA aAx ", "<|endoftext|>"]
    expected = [theirs.encode(text) for text in texts]
    assert [ours.tokenize(text) for text in texts] == expected
    assert ours.vocab_size == len(theirs)
    ours = pickle.loads(pickle.dumps(ours))
    ours.prepare_batches()
    assert ours.tokenize_batch(texts).ids.tolist() == [token_id for ids in expected for token_id in ids]
    assert (ours.bos, ours.eod, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({NUMBERED: {"<a>": 10}}, "added_tokens.json gives '<a>' the id 10, but with .*tokenizer.json it gets 4505; give files of one"),
        ({NUMBERED: {"<a>": NEXT_ID + 1}}, "added_tokens.json gives '<a>' the id 4506, but"),
        ({NUMBERED: {"<a>": "4505"}}, "added_tokens.json: <a> must be a whole number"),
        ({CONFIG: {"added_tokens_decoder": {"7": token("<a>")}}}, "tokenizer_config.json gives '<a>' the id 7, but"),
        ({CONFIG: {"added_tokens_decoder": {"x": token("<a>")}}}, "added_tokens_decoder.x must be a member whose key is an id"),
        ({CONFIG: {"pad_token": 5}}, 'pad_token must be a string, or an object with "content", not 5'),
        ({MAP: {"extra_special_tokens": [["<a>"]]}}, "extra_special_tokens.0 must be a string"),
        ({NUMBERED: {"\ud800": NEXT_ID}}, r"added_tokens.json has '\\ud800', which is not a string of Unicode characters; copy it again"),
        ({CONFIG: {"split_special_tokens": 1}}, "tokenizer_config.json: split_special_tokens must be true or false, not 1"),
    ],
)
def test_tokens_beside_that_contradict_tokenizer_json_or_are_none_are_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    write_beside(tmp_path, files)
    with pytest.raises(UserError, match=message):
        HuggingFaceTokenizer(str(tmp_path))
