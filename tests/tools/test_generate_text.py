"""Checkpoints are written in pieces of odd sizes, as by any number of ranks."""

import json
import sys
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import generate_text
import pytest
import torch
from generate_text import load_model, open_checkpoint, until_end
from harness.rank_threads import on_ranks
from harness.run_state import run_state
from harness.small_gpt import VOCAB, small_config, small_gpt
from harness.small_state import Gathering
from harness.tool import run_tool
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from train_tokenizer import train_model

from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, MARKER_FILE, Manifest, marker_json
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions, Share
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizers.tokenizer import NullTokenizer, build_tokenizer
from megatron_zpp.model.generation import Sampling, generated_tokens
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.zero.pieces import Piece

RANKS = 3
PROMPT = [5, 9, 2]
NULL = DataConfig(data_path=("corpus",), tokenizer_type="NullTokenizer", vocab_size=VOCAB)


def write_checkpoint(directory: Path, model: GPT, iteration: int = 7, data: DataConfig = NULL) -> Path:
    """The iteration's folder. Every parameter has RANKS pieces, unless it is too small."""
    pieces: list[list[Piece]] = [[] for _ in range(RANKS)]
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        ends = [0, flat.numel() // 5, flat.numel() // 2, flat.numel()]
        for rank, (start, stop) in enumerate(pairwise(ends)):
            pieces[rank].append(Piece(name, "weight", start, stop, flat[start:stop]))
    gathering = Gathering(RANKS)
    savers = [CheckpointSaver(directory, Share(rank, RANKS, pieces[rank]), SaveOptions(), gathering.of(rank)) for rank in range(RANKS)]
    flags = {"model": asdict(model.config), "data": asdict(data), "padded_vocab_size": model.padded_vocab_size}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    manifest = Manifest(iteration, 0, shapes, {"weight": "F32"}, run_state(0), flags, {}, {})
    on_ranks(RANKS, lambda rank: savers[rank].save(manifest))
    return iteration_folder(directory, iteration)


def continuation(model: GPT, prompt: list[int], count: int, sampling: Sampling, seed: int) -> list[int]:
    """What the model itself generates, up to the end of a document."""
    tokens = islice(generated_tokens(model.eval(), prompt, sampling, torch.Generator().manual_seed(seed)), count)
    return list(until_end(tokens, NullTokenizer(VOCAB)))


def words(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


class Refusal:
    """Runs the tool in this process, which saves the start of another, and expects an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, directory: Path, arguments: tuple[object, ...], message: str) -> None:
        self.monkeypatch.setattr(sys, "argv", ["generate_text.py", "--load", str(directory), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            generate_text.main()
        printed = self.capsys.readouterr()
        assert ended.value.code == 2
        assert printed.err.startswith("generate_text.py: error: ")
        assert message in printed.err
        assert printed.out == ""


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(monkeypatch, capsys)


@pytest.mark.parametrize("untied", [False, True])
def test_weights_from_any_pieces_are_the_saved_ones(tmp_path: Path, untied: bool) -> None:
    model = small_gpt(untie_embeddings_and_output_weights=untied)
    write_checkpoint(tmp_path, model)
    loaded = load_model(open_checkpoint(tmp_path, None))
    assert not loaded.training
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_the_tool_prints_the_prompt_and_what_the_model_continues_it_with(tmp_path: Path) -> None:
    model = small_gpt()
    write_checkpoint(tmp_path, model)
    arguments = ("--prompt", words(PROMPT), "--max-new-tokens", 20, "--temperature", 0.7, "--top-k", 11, "--seed", 3)
    done = run_tool("generate_text", "--load", tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == words(PROMPT + continuation(model, PROMPT, 20, Sampling(VOCAB, 0.7, 11), seed=3))


def test_without_a_prompt_a_document_begins(tmp_path: Path) -> None:
    model = small_gpt()
    write_checkpoint(tmp_path, model)
    done = run_tool("generate_text", "--load", tmp_path, "--max-new-tokens", 5, "--temperature", 0)
    assert done.stdout.strip() == words(continuation(model, [NullTokenizer(VOCAB).eod], 5, Sampling(VOCAB, 0), seed=0))


def test_generation_ends_with_the_document() -> None:
    assert list(until_end(iter([3, 1, VOCAB - 1, 4]), NullTokenizer(VOCAB))) == [3, 1]


@pytest.mark.parametrize(
    ("around", "prompt", "ids"),
    [
        ("$A </s>", "a b", [0, 1]),
        ("$A </s>", "a </s>", [0, 2]),
        ("$A </s>", "", []),
        ("</s> $A", "a b", [2, 0, 1]),
        ("$A", "a </s>", [0, 2]),
    ],
)
def test_a_prompt_has_no_end_that_its_tokenizer_puts_behind_every_text(tmp_path: Path, around: str, prompt: str, ids: list[int]) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "</s>": 2}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=[("</s>", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert generate_text._prompt_ids(prompt, build_tokenizer(data), data) == ids


def test_the_iteration_can_be_chosen(tmp_path: Path) -> None:
    old, new = small_gpt(seed=1), small_gpt(seed=2)
    write_checkpoint(tmp_path, old, iteration=5)
    write_checkpoint(tmp_path, new, iteration=10)
    for step, model in ((5, old), (10, new), (None, new)):
        loaded = load_model(open_checkpoint(tmp_path, step))
        assert torch.equal(loaded.embedding.word.weight, model.embedding.word.weight)


def test_another_path_to_the_tokenizer_replaces_that_of_the_training(tmp_path: Path, refused: Refusal) -> None:
    sentences = [f"{a}{b}{c} " for a in "abcd" for b in "efgh" for c in "ijkl"]
    tokenizer = tmp_path / "tok.model"
    tokenizer.write_bytes(train_model(sentences, vocab_size=290, model_type="bpe"))
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model="gone.model")
    write_checkpoint(tmp_path / "saved", materialize(GPT(small_config(make_vocab_size_divisible_by=16), 304, 7, torch.float32)), data=data)
    theirs = "--tokenizer-model gone.model is that of the checkpoint's run, and is relative to the folder where that run was started"
    refused(tmp_path / "saved", (), f"{theirs}; give the file with --tokenizer-model.")
    done = run_tool("generate_text", "--load", tmp_path / "saved", "--prompt", "aei", "--tokenizer-model", tokenizer)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("aei")
    write_checkpoint(tmp_path / "smaller", small_gpt(), data=data)
    refused(tmp_path / "smaller", ("--tokenizer-model", tokenizer), "the tokenizer has 290 ids, and the model 61; give")
    larger = materialize(GPT(small_config(make_vocab_size_divisible_by=16), 320, 7, torch.float32))
    write_checkpoint(tmp_path / "larger", larger, data=data)
    message = "the tokenizer has 290 ids, with padding 304, and the model 320; give the --tokenizer-model that the training used."
    refused(tmp_path / "larger", ("--tokenizer-model", tokenizer), message)


def test_a_tokenizer_of_text_can_be_given_to_a_checkpoint_that_names_none(tmp_path: Path, refused: Refusal) -> None:
    tokenizer = tmp_path / "tok.model"
    sentences = [f"{a}{b}{c} " for a in "abcd" for b in "efgh" for c in "ijkl"]
    tokenizer.write_bytes(train_model(sentences, vocab_size=290, model_type="bpe"))
    model = materialize(GPT(small_config(make_vocab_size_divisible_by=16), 304, 7, torch.float32))
    write_checkpoint(tmp_path / "saved", model, data=DataConfig(tokenizer_type="NullTokenizer", vocab_size=304))
    refused(tmp_path / "saved", ("--prompt", "aei"), "The checkpoint names no tokenizer of text; --tokenizer-type and --tokenizer-model")
    given = ("--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", tokenizer)
    done = run_tool("generate_text", "--load", tmp_path / "saved", "--prompt", "aei", *given)
    assert done.returncode == 0 and done.stdout.startswith("aei"), done.stderr


def test_ids_can_be_asked_for_in_place_of_the_text_of_a_tokenizer_that_is_gone(tmp_path: Path) -> None:
    gone = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model="gone.model")
    model = materialize(GPT(small_config(make_vocab_size_divisible_by=16), 304, 7, torch.float32))
    write_checkpoint(tmp_path, model, data=gone)
    asked = ("--prompt", "5 6", "--max-new-tokens", 2, "--tokenizer-type", "NullTokenizer")
    done = run_tool("generate_text", "--load", tmp_path, *asked)
    assert done.returncode == 0 and done.stdout.startswith("5 6"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ckpt-step", 8), "--ckpt-step 8"),
        (("--temperature", -1), "temperature -1.0 is negative"),
        (("--top-k", 62), "top-k 62 is not within 0..61"),
        (("--prompt", "5 x"), "ids separated by spaces"),
        (("--prompt", "5 61"), "Token id 61"),
    ],
)
def test_unusable_requests_are_refused(tmp_path: Path, refused: Refusal, arguments: tuple[object, ...], message: str) -> None:
    write_checkpoint(tmp_path, small_gpt())
    refused(tmp_path, arguments, message)


@pytest.mark.parametrize("flag, number", [("--max-new-tokens", "0"), ("--top-k", "-1"), ("--seed", "9" * 30)])
def test_numbers_out_of_range_are_refused(capsys: pytest.CaptureFixture[str], flag: str, number: str) -> None:
    with pytest.raises(SystemExit):
        generate_text._parser().parse_args(["--load", "saved", "--prompt", "5", flag, number])
    assert f"error: argument {flag}: {number} is not a whole number from " in capsys.readouterr().err


def damage_manifest(folder: Path, change: dict[str, Any]) -> None:
    path = folder / MANIFEST_FILE
    text = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    (folder / MARKER_FILE).write_text(marker_json(text))


def test_unusable_checkpoints_are_refused(tmp_path: Path, refused: Refusal) -> None:
    refused(tmp_path / "none", (), "holds no checkpoint")
    folder = write_checkpoint(tmp_path, small_gpt())
    whole = (folder / "manifest.json").read_text()
    flags = json.loads(whole)["flags"]
    damage_manifest(folder, {"flags": {**flags, "model": {**flags["model"], "num_eyes": 2}}})
    refused(tmp_path, (), "the model flags in the manifest of iteration 7")
    damage_manifest(folder, {"flags": {"model": flags["model"]}})
    refused(tmp_path, (), "has no flags for data")
    damage_manifest(folder, json.loads(whole))
    (folder / "rank_00001.safetensors").write_bytes(b"short")
    refused(tmp_path, ("--prompt", "1"), "rank_00001.safetensors has 5 bytes, its manifest says")
