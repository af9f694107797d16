"""To Hugging Face and back. transformers is the independent reference; the package does not need it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import convert_from_hf
import convert_to_hf
import pytest
import sentencepiece
import torch
from generate_text import load_model, open_checkpoint
from safetensors.torch import load_file
from small_gpt import VOCAB, small_config, small_gpt
from test_generate_text import write_checkpoint
from tool import ROOT
from train_tokenizer import train_model

from megatron_zpp.config.schema import DataConfig, ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.initialization import materialize

PADDED = 64
NULL = DataConfig(data_path=("corpus",), tokenizer_type="NullTokenizer", vocab_size=VOCAB)


def gpt2_config(**changes: Any) -> ModelConfig:
    """A small model whose heads are as wide as GPT-2's."""
    return small_config(kv_channels=8, **changes)


def randomized(untied: bool = False) -> GPT:
    """A model in which no weight has a value that another could have by chance."""
    model = materialize(GPT(gpt2_config(untie_embeddings_and_output_weights=untied), PADDED, 7, torch.float32)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def call(tool: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Runs a tool in this process, which spares the start of another."""
    monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", *map(str, arguments)])
    tool.main()


def exported(tmp_path: Path, model: GPT, monkeypatch: pytest.MonkeyPatch, *arguments: object, data: DataConfig = NULL) -> Path:
    write_checkpoint(tmp_path / "saved", model, data=data)
    call(convert_to_hf, monkeypatch, "--load", tmp_path / "saved", "--output", tmp_path / "hf", *arguments)
    return tmp_path / "hf"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(open_checkpoint(directory, None)).state_dict())


@pytest.mark.parametrize("untied", [False, True])
def test_transformers_computes_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untied: bool) -> None:
    from transformers import GPT2LMHeadModel

    model = randomized(untied)
    folder = exported(tmp_path, model, monkeypatch, "--max-shard-size", 1e-5)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    theirs, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokens = torch.randint(VOCAB, (3, model.config.seq_length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours = model(tokens, None, first_sample=0)[..., :VOCAB]
        found = theirs.eval()(tokens).logits
    assert found.shape == ours.shape
    assert torch.allclose(found, ours, rtol=1e-5, atol=1e-5)
    assert ours.abs().max() > 1  # logits that a mistake would change visibly


@pytest.mark.parametrize("untied", [False, True])
def test_there_and_back_every_weight_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untied: bool) -> None:
    model = randomized(untied)
    folder = exported(tmp_path, model, monkeypatch, "--keep-vocab-padding")
    back = ("--input", folder, "--output", tmp_path / "back", "--make-vocab-size-divisible-by", PADDED)
    call(convert_from_hf, monkeypatch, *back)
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "release"
    found = weights(tmp_path / "back")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items())


def test_padding_rows_are_left_out_and_come_back_as_the_mean_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomized()
    folder = exported(tmp_path, model, monkeypatch)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCAB
    call(convert_from_hf, monkeypatch, "--input", folder, "--output", tmp_path / "back", "--make-vocab-size-divisible-by", PADDED)
    ours, found = model.embedding.word.weight, weights(tmp_path / "back")["embedding.word.weight"]
    assert torch.equal(found[:VOCAB], ours[:VOCAB])
    assert torch.equal(found[VOCAB:], ours[:VOCAB].mean(0, keepdim=True).expand(PADDED - VOCAB, -1))


def test_what_transformers_saves_is_read_with_and_without_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=12, n_embd=24, n_layer=2, n_head=3, initializer_range=0.3)).eval()
    theirs.save_pretrained(tmp_path / "with head")
    theirs.transformer.save_pretrained(tmp_path / "without head")
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(5))
    for name in ("with head", "without head"):
        call(convert_from_hf, monkeypatch, "--input", tmp_path / name, "--output", tmp_path / "ours" / name)
        ours = load_model(open_checkpoint(tmp_path / "ours" / name, None))
        assert ours.padded_vocab_size == 128
        with torch.no_grad():
            assert torch.allclose(ours(tokens, None, first_sample=0)[..., :50], theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_bf16_is_the_rounded_weight_and_comes_back_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomized()
    folder = exported(tmp_path, model, monkeypatch, "--dtype", "bfloat16", "--keep-vocab-padding")
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    call(convert_from_hf, monkeypatch, "--input", folder, "--output", tmp_path / "back", "--make-vocab-size-divisible-by", PADDED)
    found = weights(tmp_path / "back")
    assert all(torch.equal(found[name], weight.bfloat16().float()) for name, weight in model.state_dict().items())


def test_the_exported_tokenizer_gives_the_ids_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    lines = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line]
    path = tmp_path / "tok.model"
    path.write_bytes(train_model(lines, vocab_size=420, model_type="bpe"))
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(path), vocab_size=420)
    folder = exported(tmp_path, materialize(GPT(gpt2_config(), 448, 7, torch.float32)), monkeypatch, data=data)
    pieces, theirs = sentencepiece.SentencePieceProcessor(model_file=str(path)), AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == 420 and theirs.eos_token_id == pieces.eos_id()
    texts = [*lines, "\n".join(lines), "  two  spaces ", "tab\tand\nline", "Zürich 東京 😀 — \u00a0x", "a", " ", "unpronounceablexyzzy" * 3]
    for text in texts:
        ids = pieces.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.decode(ids) == text


def test_a_tokenizer_of_another_kind_goes_along_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "tok.model"
    path.write_bytes(train_model([f"{a}{b}{c} " for a in "abcd" for b in "efgh" for c in "ijkl"], vocab_size=280, model_type="unigram"))
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(path), vocab_size=280)
    folder = exported(tmp_path, materialize(GPT(gpt2_config(), 304, 7, torch.float32)), monkeypatch, data=data)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.model"}
    assert "tokenizer.model alone" in capsys.readouterr().out


def refusal(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        call(tool, monkeypatch, *arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_models_that_the_layout_has_no_place_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model = materialize(GPT(small_config(kv_channels=5), PADDED, 7, torch.float32))
    write_checkpoint(tmp_path / "saved", model)
    message = refusal(convert_to_hf, monkeypatch, capsys, "--load", tmp_path / "saved", "--output", tmp_path / "hf")
    assert "channels" in message and "cannot be converted" in message
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob("hf.tmp*"))
    write_checkpoint(tmp_path / "unknown", randomized(), data=DataConfig())
    message = refusal(convert_to_hf, monkeypatch, capsys, "--load", tmp_path / "unknown", "--output", tmp_path / "hf")
    assert "give --vocab-size or --keep-vocab-padding" in message
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    message = refusal(convert_to_hf, monkeypatch, capsys, "--load", tmp_path / "saved", "--output", tmp_path / "full")
    assert "cannot be converted" in message or "exists already" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "type llama; only gpt2"),
        ({"activation_function": "relu"}, "activation_function relu"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
        ({"n_positions": 9}, "has shape"),
        ({"n_layer": 3}, "has no tensor transformer.h.2"),
        ({"n_layer": 1}, "tensors that a GPT-2 does not: transformer.h.1"),
    ],
)
def test_folders_that_are_no_gpt2_of_ours_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, change: dict[str, Any], words: str
) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert words in refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")
    assert not (tmp_path / "back").exists() or not list((tmp_path / "back").iterdir())


def test_pickled_weights_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")
    assert "pickled files (.bin) are never opened" in message
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"\x80\x04\x95" * 9)
    assert "cannot be read" in refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")


def test_the_configuration_comes_back_from_their_config_json() -> None:
    from megatron_zpp.checkpoint.gpt2_layout import config_json, model_config

    model = gpt2_config()
    fields = asdict(model_config(config_json(model, VOCAB, None)))
    same = {name: value for name, value in asdict(model).items() if name not in ("make_vocab_size_divisible_by", "seq_length")}
    assert {name: fields[name] for name in same} == same
