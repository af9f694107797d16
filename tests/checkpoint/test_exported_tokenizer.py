"""What AutoTokenizer of transformers makes of an exported tokenizer, beside the tokenizer of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.cut_tokenizers import cut_tokenizer
from harness.trained_tokenizers import training_texts, write_gpt2_files, write_sentencepiece_model

from megatron_zpp.checkpoint.export import write_json
from megatron_zpp.checkpoint.hf.tokenizer import boundaries_of, write_tokenizer
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizers.fast_encoder import HARD_TEXTS
from megatron_zpp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.data.tokenizers.tokenizer_json import PATTERNS

SYMBOLS = ["<start_of_turn>", "<end_of_turn>", "<table>", "\n\n", "\n\n\n", "\t"]
GEMMA = {"user_defined_symbols": SYMBOLS, "control_symbols": ["<mask>"], "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
SPELLINGS = ["<s>", "</s>", "<pad>", "<unk>", "<mask>", "<0x0A>", "<|endoftext|>", "<EOD>", "<a>", "word", "▁▁", *SYMBOLS]
TEXTS = [
    *HARD_TEXTS,
    "",
    *SPELLINGS,
    *(f"a{spelling}b {spelling} {spelling}{spelling}" for spelling in SPELLINGS),
    "<start_of_turn>the cat\n\n<table>sat<end_of_turn>",
]
MODEL_TYPES = ("gpt2", "llama", "qwen2", "qwen3")


def exported(folder: Path, data: DataConfig, model_type: str) -> tuple[str, Tokenizer, Any]:
    """The sentence on what was written into `folder`, the tokenizer of the run, and the one that AutoTokenizer makes."""
    from transformers import AutoTokenizer

    folder.mkdir()
    tokenizer = build_tokenizer(data)
    written = write_tokenizer(folder, data, tokenizer, model_type)
    write_json(folder / "config.json", {"model_type": model_type, **boundaries_of(tokenizer).members(), **written.members})
    place = folder / "tokenizer"
    return written.note, tokenizer, AutoTokenizer.from_pretrained(place if place.exists() else folder)


def check_same_ids(tokenizer: Tokenizer, theirs: Any, texts: list[str] = TEXTS) -> None:
    for text in texts:
        assert theirs.encode(text) == tokenizer.tokenize(text), text


def pieces(path: Path, kind: str = "SentencePieceTokenizer", **options: Any) -> DataConfig:
    return DataConfig(tokenizer_type=kind, tokenizer_model=write_sentencepiece_model(path, **options))


def huggingface(folder: Path, content: dict[str, Any], **config: Any) -> DataConfig:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **config}))
    return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


@pytest.mark.parametrize(
    ("options", "model_type"),
    [*(({}, model_type) for model_type in MODEL_TYPES), (GEMMA, "llama"), (GEMMA, "qwen2"), ({"add_dummy_prefix": True}, "llama")],
)
def test_a_sentencepiece_bpe_has_its_ids_also_where_a_text_spells_its_symbols(
    tmp_path: Path, options: dict[str, Any], model_type: str
) -> None:
    data = pieces(tmp_path / "a.model", **options)
    note, tokenizer, theirs = exported(tmp_path / "hf", data, model_type)
    assert ("in the folder tokenizer, because" in note) == (model_type == "qwen2")
    check_same_ids(tokenizer, theirs)
    assert (theirs.eos_token_id, theirs.bos_token_id, len(theirs)) == (tokenizer.eod, tokenizer.eod, tokenizer.vocab_size)
    text = "the fox\n\n<table>  b"
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.decode([tokenizer.eod], skip_special_tokens=True) == ""
    back = build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=theirs.name_or_path))
    check_same_ids(back, theirs)


OTHER_MODELS = {
    "unigram": {"model_type": "unigram", "vocab_size": 290},
    "words": {"model_type": "word", "byte_fallback": False, "vocab_size": 14, "add_dummy_prefix": True},
    "normalizing": {"normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": True, "remove_extra_whitespaces": True},
    "symbols after a space": {**GEMMA, "add_dummy_prefix": True},
}


@pytest.mark.parametrize(
    ("name", "model_type"), [*((name, "llama") for name in OTHER_MODELS), ("normalizing", "gpt2"), ("normalizing", "qwen3")]
)
def test_another_sentencepiece_model_goes_alone_and_transformers_encodes_with_its_package(
    tmp_path: Path, name: str, model_type: str
) -> None:
    note, tokenizer, theirs = exported(tmp_path / "hf", pieces(tmp_path / "a.model", **OTHER_MODELS[name]), model_type)
    assert note.startswith("tokenizer.model alone, for the sentencepiece library: ")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "tokenizer.model"}
    check_same_ids(tokenizer, theirs)


@pytest.mark.parametrize("options", [{"vocab_size": 40}, {"model_type": "word", "vocab_size": 15}], ids=["letters", "words"])
def test_a_sentencepiece_model_whose_unknown_letters_may_spell_its_symbols_goes_to_a_folder_of_its_own(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    data = pieces(tmp_path / "a.model", byte_fallback=False, control_symbols=["[X]"], **options)
    folder, tokenizer = tmp_path / "hf", build_tokenizer(data)
    folder.mkdir()
    written = write_tokenizer(folder, data, tokenizer, "llama")
    assert written.note.endswith("it is in the folder tokenizer, because beside config.json AutoTokenizer would give other ids with it")
    assert (written.members, [path.name for path in folder.rglob("*.*")]) == ({}, ["tokenizer.model"])


def test_an_exported_earlier_llama2_tokenizer_begins_every_text_with_its_piece(tmp_path: Path) -> None:
    data = replace(pieces(tmp_path / "a.model", "Llama2Tokenizer", **GEMMA), legacy_tokenizer=True)
    note, tokenizer, theirs = exported(tmp_path / "hf", data, "llama")
    assert note == "tokenizer.json, tokenizer.model and tokenizer_config.json"
    check_same_ids(tokenizer, theirs)
    assert (theirs.bos_token_id, theirs.encode("")) == (tokenizer.bos, [tokenizer.bos])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_exported_gpt2_tokenizer_has_its_ids_also_where_a_text_spells_the_end_of_documents(tmp_path: Path, model_type: str) -> None:
    vocab_file, merge_file = write_gpt2_files(tmp_path)
    data = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    note, tokenizer, theirs = exported(tmp_path / "hf", data, model_type)
    assert ("in the folder tokenizer, because" in note) == (model_type == "qwen2")
    check_same_ids(tokenizer, theirs, [*TEXTS, *training_texts()])
    copies = list((tmp_path / "hf").rglob("vocab.json")) + list((tmp_path / "hf").rglob("merges.txt"))
    assert [path.read_bytes() for path in copies] == [Path(vocab_file).read_bytes(), Path(merge_file).read_bytes()]
    assert (theirs.eos_token_id, theirs.eos_token, len(theirs)) == (tokenizer.eod, "<|endoftext|>", tokenizer.vocab_size)


METASPACE = {
    "added_tokens": ["<a>", "<s>"],
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_tokenizer_json_is_read_as_it_is_by_every_kind_of_model(tmp_path: Path, model_type: str) -> None:
    data = huggingface(tmp_path / "run", cut_tokenizer(**METASPACE))
    note, tokenizer, theirs = exported(tmp_path / "hf", data, model_type)
    assert ("in the folder tokenizer, because" in note) == (model_type == "qwen2")
    check_same_ids(tokenizer, theirs)
    assert (theirs.eos_token_id, len(theirs)) == (tokenizer.eod, tokenizer.vocab_size)


# What AutoTokenizer follows in a tokenizer_config.json, and training does not.
OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "a class with rules of its own": {"tokenizer_class": "T5Tokenizer"},
    "a space before every text": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    "a class that adds tokens": {"tokenizer_class": "BertTokenizer"},
    "a begin-of-text": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"},
}


@pytest.mark.parametrize("config", OTHER_CONFIGS.values(), ids=OTHER_CONFIGS)
def test_rules_of_a_tokenizer_config_that_training_did_not_follow_are_left_behind(tmp_path: Path, config: dict[str, Any]) -> None:
    content = cut_tokenizer(PATTERNS[2], added_tokens=["<a>", "<s>"], ignore_merges=True)
    _, tokenizer, theirs = exported(tmp_path / "hf", huggingface(tmp_path / "run", content, **config), "gpt2")
    check_same_ids(tokenizer, theirs)
    assert len(theirs) == tokenizer.vocab_size


def test_a_tokenizer_of_qwen2_stays_beside_its_config_json(tmp_path: Path) -> None:
    content = cut_tokenizer(PATTERNS[1], normalizer={"type": "NFC"}, added_tokens=["<a>"])
    data = huggingface(tmp_path / "run", content, tokenizer_class="Qwen2Tokenizer", pad_token="<a>", extra_special_tokens=["<EOD>"])
    note, tokenizer, theirs = exported(tmp_path / "hf", data, "qwen2")
    assert (note, type(theirs).__name__) == ("tokenizer.json and tokenizer_config.json", "Qwen2Tokenizer")
    check_same_ids(tokenizer, theirs)
    assert (theirs.pad_token_id, len(theirs)) == (tokenizer.pad, tokenizer.vocab_size)


def beginning(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The content with the added token `name` before every text."""
    token_id = next(token["id"] for token in content["added_tokens"] if token["content"] == name)
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {name: {"id": name, "ids": [token_id], "tokens": [name]}}
    return {
        **content,
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": [*single, single[1]], "special_tokens": special},
    }


@pytest.mark.parametrize("is_left_out", [False, True])
@pytest.mark.parametrize("config", [{}, {"bos_token": "<s>", "pad_token": "<a>"}], ids=["unnamed", "named"])
def test_what_begins_a_text_is_that_of_training(tmp_path: Path, config: dict[str, str], is_left_out: bool) -> None:
    content = beginning(cut_tokenizer(added_tokens=["<a>", "<s>"]), "<s>")
    data = replace(huggingface(tmp_path / "run", content, **config), tokenizer_hf_no_include_special_tokens=is_left_out)
    _, tokenizer, theirs = exported(tmp_path / "hf", data, "llama")
    check_same_ids(tokenizer, theirs)
    begin = theirs.convert_tokens_to_ids("<|endoftext|>" if is_left_out else "<s>")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert theirs.encode("")[:1] == ([] if is_left_out else [begin])
    assert (written["bos_token_id"], theirs.bos_token_id) == (begin, begin)
    assert written["pad_token_id"] == theirs.pad_token_id == (theirs.convert_tokens_to_ids("<a>") if config else None)


def test_tokens_of_the_files_beside_are_exported_with_their_ids(tmp_path: Path) -> None:
    data = huggingface(tmp_path / "run", cut_tokenizer(), extra_special_tokens=["<a>"], chat_template="{{ x }}", model_max_length=10**30)
    next_id = cut_tokenizer()["added_tokens"][0]["id"] + 1
    (tmp_path / "run" / "added_tokens.json").write_text(json.dumps({"<EOD>": next_id, "word": next_id + 1}))
    (tmp_path / "run" / "chat_template.jinja").write_text("{{ messages }}")
    _, tokenizer, theirs = exported(tmp_path / "hf", data, "llama")
    check_same_ids(tokenizer, theirs)
    assert len(theirs) == tokenizer.vocab_size == next_id + 3
    assert (theirs.chat_template, theirs.model_max_length) == ("{{ messages }}", 10**30)


def test_an_end_of_documents_that_is_no_added_token_is_not_made_one_by_its_name(tmp_path: Path) -> None:
    content = cut_tokenizer()
    content["model"]["vocab"]["<|endoftext|>"] = content["added_tokens"].pop()["id"]
    data = huggingface(tmp_path / "run", content, eos_token=None)
    _, tokenizer, theirs = exported(tmp_path / "hf", data, "gpt2")
    check_same_ids(tokenizer, theirs)
    assert len(tokenizer.tokenize("<|endoftext|>")) > 1
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == tokenizer.eod


def test_tokens_that_the_files_beside_name_are_plain_text_with_split_special_tokens(tmp_path: Path) -> None:
    content = cut_tokenizer(added_tokens=["<a>", "<s>"])
    content["added_tokens"][1]["special"] = False
    data = huggingface(tmp_path / "run", content, pad_token="<a>", split_special_tokens=True)
    _, tokenizer, theirs = exported(tmp_path / "hf", data, "llama")
    check_same_ids(tokenizer, theirs)
    assert len(tokenizer.tokenize("<a>")) == 3


def test_an_end_of_documents_that_is_not_special_keeps_its_id_in_texts_with_split_special_tokens(tmp_path: Path) -> None:
    content = cut_tokenizer()
    content["added_tokens"][0]["special"] = False
    _, tokenizer, theirs = exported(
        tmp_path / "hf", huggingface(tmp_path / "run", content, eos_token=None, split_special_tokens=True), "llama"
    )
    check_same_ids(tokenizer, theirs)
    assert tokenizer.tokenize("<|endoftext|>") == [tokenizer.eod]


def test_a_tokenizer_that_qwen2_cannot_rebuild_goes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "##b": 1, "ab": 2, "<|endoftext|>": 3}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["a", "##b"]], "continuing_subword_prefix": "##", "unk_token": "<|endoftext|>"}
    content = {**cut_tokenizer(), "model": model}
    content["added_tokens"] = [{**content["added_tokens"][0], "id": 3}]
    note, tokenizer, theirs = exported(tmp_path / "hf", huggingface(tmp_path / "run", content), "qwen2")
    assert "in the folder tokenizer, because" in note
    check_same_ids(tokenizer, theirs)


def test_a_tokenizer_that_leaves_out_merges_at_random_is_not_exported(tmp_path: Path) -> None:
    data = huggingface(tmp_path / "run", cut_tokenizer(dropout=0.5))
    (tmp_path / "hf").mkdir()
    note = write_tokenizer(tmp_path / "hf", data, build_tokenizer(data), "llama").note
    assert note == "no tokenizer files: its tokenizer.json leaves out merges at random, so the same text has other ids each time"


def test_a_tokenizer_that_refuses_texts_is_exported(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<|endoftext|>": 2}, "unk_token": "<unk>"}
    content = {**cut_tokenizer(), "model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None}
    content["added_tokens"] = [{**content["added_tokens"][0], "id": 2}]
    _, tokenizer, theirs = exported(tmp_path / "hf", huggingface(tmp_path / "run", content), "llama")
    check_same_ids(tokenizer, theirs, ["a b a", "<|endoftext|> b", ""])
    with pytest.raises(Exception, match="UNK"):
        tokenizer.tokenize("c")
