"""To Hugging Face and back. transformers is the independent reference; the package does not need it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import convert_from_hf
import convert_to_hf
import generate_text
import pytest
import sentencepiece
import torch
from generate_text import load_model, open_checkpoint
from harness.cut_tokenizers import added_token, cut_tokenizer
from harness.places import ROOT
from harness.small_gpt import VOCAB, small_config, small_gpt
from safetensors.torch import load_file, save_file
from test_generate_text import write_checkpoint
from train_tokenizer import train_model

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.checkpoint.hf import gpt2
from megatron_zpp.checkpoint.hf.folder import HfFolder
from megatron_zpp.checkpoint.hf.layouts import layout_holding, layout_of_type
from megatron_zpp.checkpoint.hf.rules import Boundaries
from megatron_zpp.checkpoint.stored_flags import data_flags
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import DataConfig, ModelConfig
from megatron_zpp.data.tokenizers.tokenizer import embedding_rows
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError

PADDED = 64
NULL = DataConfig(data_path=("corpus",), tokenizer_type="NullTokenizer", vocab_size=VOCAB)


def gpt2_config(**changes: Any) -> ModelConfig:
    """A small model whose heads are as wide as GPT-2's."""
    return small_config(kv_channels=8, **changes)


ROTARY: dict[str, Any] = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "num_query_groups": 1}
NO_BIASES = {**ROTARY, "disable_bias_linear": True}
LLAMA_3 = {"use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 8, "rotary_base": 100.0, "rope_scaling_factor": 4.0}
UNTIED = {"untie_embeddings_and_output_weights": True}
# 3 heads of 8 channels for a hidden size of 24; or the 10 channels of small_config if the layout can express them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {"kv_channels": 8}),
    "GPT-2, untied": ("GPT2LMHeadModel", {"kv_channels": 8, **UNTIED}),
    "GPT-2 with gains minus one": ("GPT2LMHeadModel", {"kv_channels": 8, "apply_layernorm_1p": True}),
    "Llama 2, untied": ("LlamaForCausalLM", {**NO_BIASES, **UNTIED, "num_query_groups": 3}),
    "Llama 3": ("LlamaForCausalLM", {**NO_BIASES, **LLAMA_3}),
    "Llama with biases, interpolated": ("LlamaForCausalLM", {**ROTARY, "rotary_seq_len_interpolation_factor": 2.0}),
    "Qwen2": (
        "Qwen2ForCausalLM",
        {**NO_BIASES, **UNTIED, "kv_channels": 6, "num_attention_heads": 4, "num_query_groups": 2, "add_qkv_bias": True},
    ),
    "Qwen3": ("Qwen3ForCausalLM", {**NO_BIASES, "qk_layernorm": True}),
}


def randomized(**changes: Any) -> GPT:
    """A model, by default a GPT-2, in which no two weights have the same value by chance."""
    model = materialize(GPT(small_config(**(changes or {"kv_channels": 8})), PADDED, 7, torch.float32)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def call(tool: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Runs a tool in this process, which saves the start of another."""
    monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", *map(str, arguments)])
    tool.main()


def exported(tmp_path: Path, model: GPT, monkeypatch: pytest.MonkeyPatch, *arguments: object, data: DataConfig = NULL) -> Path:
    write_checkpoint(tmp_path / "saved", model, data=data)
    call(convert_to_hf, monkeypatch, "--load", tmp_path / "saved", "--output", tmp_path / "hf", *arguments)
    return tmp_path / "hf"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(open_checkpoint(directory, None)).state_dict())


@pytest.mark.parametrize("name", list(MODELS))
def test_transformers_computes_the_same_logits_and_back_here_weights_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import transformers

    architecture, changes = MODELS[name]
    model = randomized(**changes)
    folder = exported(tmp_path, model, monkeypatch, "--max-shard-size", 1e-5)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    theirs, report = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert theirs.dtype == torch.float32
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokens = torch.randint(VOCAB, (3, model.config.seq_length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours = model(tokens, None, first_sample=0)[..., :VOCAB]
        found = theirs.eval()(tokens).logits
    assert found.shape == ours.shape
    assert torch.allclose(found, ours, rtol=1e-5, atol=1e-5)
    assert ours.abs().max() > 1  # large enough that a mistake would show

    theirs.save_pretrained(tmp_path / "saved there")
    call(convert_from_hf, monkeypatch, "--input", tmp_path / "saved there", "--output", tmp_path / "back")
    back = load_model(open_checkpoint(tmp_path / "back", None)).eval()
    with torch.no_grad():
        assert torch.allclose(back(tokens, None, first_sample=0)[..., :VOCAB], ours, rtol=1e-5, atol=1e-5)
    if not model.config.apply_layernorm_1p:
        weights, expected = back.state_dict(), model.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight[:VOCAB], expected[name][:VOCAB]) for name, weight in weights.items() if is_vocabulary(name))
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items() if not is_vocabulary(name))


def is_vocabulary(name: str) -> bool:
    return name in ("embedding.word.weight", "final.head.weight")


@pytest.mark.parametrize("name", ["GPT-2, untied", "Llama 2, untied"])
def test_there_and_back_with_its_padding_every_weight_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = randomized(**MODELS[name][1])
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


@pytest.mark.parametrize("window", [None, 12])
def test_a_mistral_without_a_window_in_its_positions_has_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(2)
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 12}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "sliding_window": window}
    theirs = MistralForCausalLM(MistralConfig(**sizes, **heads, initializer_range=0.3)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    call(convert_from_hf, monkeypatch, "--input", tmp_path / "theirs", "--output", tmp_path / "ours")
    ours = load_model(open_checkpoint(tmp_path / "ours", None)).eval()
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert torch.allclose(ours(tokens, None, first_sample=0)[..., :50], theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_bf16_is_the_rounded_weight_and_comes_back_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    model = randomized()
    folder = exported(tmp_path, model, monkeypatch, "--dtype", "bfloat16", "--keep-vocab-padding")
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"  # the name in versions before 4.56
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    call(convert_from_hf, monkeypatch, "--input", folder, "--output", tmp_path / "back", "--make-vocab-size-divisible-by", PADDED)
    found = weights(tmp_path / "back")
    assert all(torch.equal(found[name], weight.bfloat16().float()) for name, weight in model.state_dict().items())


def test_the_exported_tokenizer_gives_the_ids_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    lines = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line]
    path = tmp_path / os.fsdecode(b"t\xf6k.model")  # a name that is no text
    path.write_bytes(train_model(lines, vocab_size=420, model_type="bpe"))
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(path), vocab_size=420)
    folder = exported(tmp_path, materialize(GPT(gpt2_config(), 448, 7, torch.float32)), monkeypatch, data=data)
    pieces, theirs = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes()), AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == 420 and theirs.eos_token_id == pieces.eos_id()
    texts = [*lines, "\n".join(lines), "  two  spaces ", "tab\tand\nline", "Zürich 東京 😀 — \u00a0x", "a", " ", "unpronounceablexyzzy" * 3]
    for text in texts:
        ids = pieces.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.decode(ids) == text


def test_a_folder_with_a_tokenizer_comes_back_with_it_and_continues_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tok.model"
    path.write_bytes(train_model([f"{a}{b}{c} " for a in "abcd" for b in "efgh" for c in "ijkl"], vocab_size=290, model_type="bpe"))
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(path), vocab_size=290)
    folder = exported(tmp_path, materialize(GPT(gpt2_config(), 304, 7, torch.float32)), monkeypatch, data=data)
    monkeypatch.chdir(tmp_path)
    call(convert_from_hf, monkeypatch, "--input", folder.name, "--output", "back")
    assert f"the recorded tokenizer is HuggingFaceTokenizer with {folder}" in capsys.readouterr().out
    monkeypatch.chdir(ROOT)
    call(generate_text, monkeypatch, "--load", tmp_path / "back", "--prompt", "aei", "--max-new-tokens", 2)
    assert capsys.readouterr().out.startswith("aei")
    flags = f"--load {tmp_path / 'back'} --use-checkpoint-args --mock-data --train-iters 1"
    trained = with_checkpoint_args(parse_flags(flags.split())).data
    assert (trained.tokenizer_type, trained.tokenizer_model, trained.vocab_size) == ("HuggingFaceTokenizer", str(folder), None)


@pytest.mark.parametrize("content, reason", [(None, "because the folder has no tokenizer.json"), ("{}", "recorded: ")])
def test_without_a_tokenizer_that_can_be_read_the_ids_are_recorded_and_the_reason_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str | None, reason: str
) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch)
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    call(convert_from_hf, monkeypatch, "--input", folder, "--output", tmp_path / "back")
    assert f"no tokenizer of text is recorded{'' if content else ','}" in (printed := capsys.readouterr().out) and reason in printed
    with open_checkpoint(tmp_path / "back", None) as reader:
        assert data_flags(reader.manifest) == DataConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB)
    message = refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "o", "--tokenizer-model", "x")
    assert "--tokenizer-model x needs --tokenizer-type" in message


def test_the_tokenizer_of_the_run_is_looked_for_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model="gone.model")
    write_checkpoint(tmp_path / "saved", small_gpt(kv_channels=8), data=data)
    message = refusal(convert_to_hf, monkeypatch, capsys, "--load", tmp_path / "saved", "--output", tmp_path / "hf")
    assert "--tokenizer-model gone.model is that of the checkpoint's run, and is relative to the folder" in message


def test_a_tokenizer_of_another_kind_goes_along_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "tok.model"
    path.write_bytes(train_model([f"{a}{b}{c} " for a in "abcd" for b in "efgh" for c in "ijkl"], vocab_size=280, model_type="unigram"))
    data = DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(path), vocab_size=280)
    folder = exported(tmp_path, materialize(GPT(gpt2_config(), 304, 7, torch.float32)), monkeypatch, data=data)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.model"}
    assert "tokenizer.model alone" in capsys.readouterr().out


def test_documents_of_the_earlier_llama2_tokenizer_begin_with_its_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "tok.model"
    path.write_bytes(train_model([f"{a}{b}{c} " for a in "abcd" for b in "efgh" for c in "ijkl"], vocab_size=280, model_type="bpe"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    begin, end = pieces.bos_id(), pieces.eos_id()
    assert begin != end
    cases = [("Llama2Tokenizer", True, begin), ("Llama2Tokenizer", False, end), ("GPTSentencePieceTokenizer", True, end)]
    for kind, is_legacy, first in cases:
        data = DataConfig(tokenizer_type=kind, tokenizer_model=str(path), legacy_tokenizer=is_legacy)
        place = tmp_path / f"{kind} {is_legacy}"
        place.mkdir()
        folder = exported(place, materialize(GPT(gpt2_config(), 304, 7, torch.float32)), monkeypatch, data=data)
        config = json.loads((folder / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (first, end)
        assert AutoTokenizer.from_pretrained(folder).encode("") == ([begin] if first == begin else [])


def test_the_tokens_that_begin_and_end_a_document_come_back_in_the_configuration_that_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    content = cut_tokenizer()
    names = ("<|begin_of_text|>", "<|end_of_text|>", "<pad>")
    content["added_tokens"] = [added_token(name, index) for index, name in enumerate(names)]
    shifted = {token: index + len(names) for token, index in content["model"]["vocab"].items()}
    content["model"]["vocab"] = {**{name: index for index, name in enumerate(names)}, **shifted}
    tokens = {"bos_token": names[0], "eos_token": {"__type": "AddedToken", **added_token(names[1], 1)}, "pad_token": names[2]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "run" / "tokenizer_config.json").write_text(json.dumps(tokens))
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "run"))
    model = materialize(GPT(small_config(**{**NO_BIASES, "num_query_groups": 3}), len(shifted) + len(names), 7, torch.float32))
    folder = exported(tmp_path, model, monkeypatch, data=data)
    generates = AutoModelForCausalLM.from_pretrained(folder).generation_config
    config = json.loads((folder / "config.json").read_text())
    for found in (config, generates.to_dict()):
        assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (0, 1, 2)


def test_what_has_more_rows_than_its_tokenizer_has_ids_trains_with_that_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch, "--keep-vocab-padding")  # Qwen has padding rows too
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    call(convert_from_hf, monkeypatch, "--input", folder, "--output", tmp_path / "back", "--make-vocab-size-divisible-by", 1)
    flags = f"--load {tmp_path / 'back'} --use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size {rows - 3} --mock-data"
    config = resolve(with_checkpoint_args(parse_flags(f"{flags} --train-iters 1".split())), 1, None)
    model = ModelShape(config.model, embedding_rows(config.model, rows - 3))
    with open_checkpoint(tmp_path / "back", None) as reader:
        assert {param.name: param.whole_shape for unit in model.unit_specs() for param in unit.params} == reader.manifest.shapes


@pytest.mark.parametrize("padding", [(), ("--keep-vocab-padding",)])
def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], padding: tuple[str, ...]
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(cut_tokenizer()))
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    write_checkpoint(tmp_path / "saved", small_gpt(kv_channels=8), data=data)
    message = refusal(convert_to_hf, monkeypatch, capsys, "--load", tmp_path / "saved", "--output", tmp_path / "hf", *padding)
    assert re.search("the tokenizer has [0-9]+ ids, more than the [0-9]+ rows of the embedding", message)
    assert not (tmp_path / "hf").exists()


def test_a_kind_of_tokenizer_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    message = refusal(convert_from_hf, monkeypatch, capsys, "--input", tmp_path, "--output", tmp_path / "o", "--tokenizer-type", "Qwen2")
    assert "--tokenizer-type" in message and "invalid choice: 'Qwen2'" in message and "HuggingFaceTokenizer" in message


def settings_of(config: dict[str, Any]) -> Members:
    return Members(config, OutsideFile(Path("config.json"), "config.json", "correct it."))


def model_of(config: dict[str, Any]) -> ModelConfig:
    return layout_of_type(settings_of(config)).model_config(settings_of(config))


def refusal(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        call(tool, monkeypatch, *arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_models_that_the_layout_has_no_place_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model = materialize(GPT(small_config(kv_channels=5), PADDED, 7, torch.float32))
    write_checkpoint(tmp_path / "saved", model)
    message = refusal(convert_to_hf, monkeypatch, capsys, "--load", tmp_path / "saved", "--output", tmp_path / "hf")
    assert "cannot be converted" in message and "gpt2 has no --num-attention-heads 3 of --kv-channels 5" in message
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob("hf.tmp*"))
    write_checkpoint(tmp_path / "unknown", randomized(), data=DataConfig())
    message = refusal(convert_to_hf, monkeypatch, capsys, "--load", tmp_path / "unknown", "--output", tmp_path / "hf")
    assert "give --vocab-size or --keep-vocab-padding" in message
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    message = refusal(convert_to_hf, monkeypatch, capsys, "--load", tmp_path / "saved", "--output", tmp_path / "full")
    assert "cannot be converted" in message or "exists already" in message


@pytest.mark.parametrize(("is_exact", "name"), [(True, "gelu"), (False, "gelu_new")])
def test_a_gpt2_keeps_its_form_of_gelu(is_exact: bool, name: str) -> None:
    written = gpt2.config_json(small_config(kv_channels=8, no_bias_gelu_fusion=is_exact), VOCAB, Boundaries())
    assert written["activation_function"] == name
    assert gpt2.model_config(settings_of(written)).has_exact_gelu == is_exact


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloom"}, 'model_type must be gpt2, llama, qwen2, qwen3 or mistral, not "bloom"'),
        (
            {"activation_function": "relu"},
            'activation_function must be "gelu", "gelu_new" or "gelu_pytorch_tanh" for this model to compute it, not "relu"',
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be false"),
        ({"add_cross_attention": True}, "add_cross_attention must be false"),
        ({"n_positions": 9}, "has shape"),
        ({"n_layer": 3}, "has no tensor transformer.h.2"),
        ({"n_layer": float("nan")}, "config.json: n_layer must be a whole number from 1 to 2^63 - 1, not NaN"),
        ({"n_embd": None}, "config.json: n_embd must be a whole number from 1 to 2^63 - 1, not null"),
        ({"n_embd": "32"}, 'config.json: n_embd must be a whole number from 1 to 2^63 - 1, not "32"'),
        ({"layer_norm_epsilon": []}, "config.json: layer_norm_epsilon must be a finite number, not []"),
        ({"tie_word_embeddings": 1}, "config.json: tie_word_embeddings must be true or false, not 1"),
        ({"n_layer": 1}, "tensors that its config.json does not describe: transformer.h.1"),
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


def add_tensors(folder: Path, added: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | added, path)


def set_tied(folder: Path, is_tied: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))


def check_folder(folder: Path) -> None:
    """Raises what the tool would raise before it reads weights."""
    source = HfFolder(folder)
    model = source.layout.model_config(source.config)
    source.check_tensors([tensor for rule in source.layout.rules(model, VOCAB, PADDED) for tensor in rule.hf_tensors], model)


@pytest.mark.parametrize("name", ["GPT-2", "Qwen3"])
def test_a_head_that_the_config_ties_is_refused_unless_it_is_the_embedding_and_as_untied_gives_the_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    import transformers

    monkeypatch.setattr("megatron_zpp.checkpoint.hf.rules.COMPARED_NUMEL", 100)  # a few rows
    architecture, changes = MODELS[name]
    folder = exported(tmp_path, randomized(**changes), monkeypatch)
    embedding = "transformer.wte.weight" if name == "GPT-2" else "model.embed_tokens.weight"
    head = load_file(folder / "model.safetensors")[embedding].clone()
    add_tensors(folder, {"lm_head.weight": head})
    check_folder(folder)
    head[VOCAB - 1, 3] += 2.5
    add_tensors(folder, {"lm_head.weight": head})
    message = refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")
    assert f"lm_head.weight in {folder / 'model.safetensors'} differs from {embedding} by up to 2.5, and config.json ties them" in message
    assert "set tie_word_embeddings to false" in message
    tokens = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        kept = getattr(transformers, architecture).from_pretrained(folder).eval()(tokens).logits  # it keeps the head, and warns
        set_tied(folder, False)
        call(convert_from_hf, monkeypatch, "--input", folder, "--output", tmp_path / "back")
        ours = load_model(open_checkpoint(tmp_path / "back", None)).eval()(tokens, None, first_sample=0)[..., :VOCAB]
    assert torch.allclose(ours, kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda head: torch.cat([head, head[:1]]), f"has shape ({VOCAB + 1}, 24), config.json says ({VOCAB}, 24)"),
        (lambda head: head.index_fill(0, torch.tensor(7), torch.nan), "differs from transformer.wte.weight by up to nan"),
        (lambda head: head.bfloat16(), "differs from transformer.wte.weight by up to 0.00"),
        (lambda head: head.char(), "is in torch.int8"),
    ],
)
def test_a_tied_head_of_another_shape_or_dtype_or_with_nan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    folder = exported(tmp_path, randomized(), monkeypatch)
    add_tensors(folder, {"lm_head.weight": change(load_file(folder / "model.safetensors")["transformer.wte.weight"])})
    with pytest.raises(UserError, match=re.escape(words)):
        check_folder(folder)


MASK = torch.ones(1, 1, 24, 24).tril()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("bias", [MASK.to(dtype) for dtype in (torch.uint8, torch.bool, torch.float16, torch.float32)], [MASK.mT.contiguous(), MASK * 2]),
        ("bias", [torch.ones(1, 1, 1, 1)], [MASK[0], torch.ones(()), torch.ones(1, 1, 24, 24)]),
        (
            "masked_bias",
            [torch.tensor(-1e4), torch.tensor([-1e9])],
            [torch.tensor(0.0), torch.tensor(torch.nan), torch.full((2,), -1e4), torch.tensor(-1e4j)],
        ),
    ],
)
def test_a_causal_mask_that_old_versions_saved_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, right: list[torch.Tensor], wrong: list[torch.Tensor]
) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch)
    for mask in right:
        add_tensors(folder, {f"transformer.h.1.attn.{name}": mask})
        check_folder(folder)
    for mask in wrong:
        add_tensors(folder, {f"transformer.h.1.attn.{name}": mask})
        with pytest.raises(UserError, match=rf"transformer.h.1.attn.{name} in .* must be .*; copy the model again, or correct"):
            check_folder(folder)


@pytest.mark.parametrize("name", ["Llama 2, untied", "Llama 3", "Llama with biases, interpolated"])
def test_frequencies_that_old_versions_saved_are_compared_within_the_rounding_of_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = exported(tmp_path, randomized(**{**MODELS[name][1], "kv_channels": 16}), monkeypatch)
    config = LlamaConfig.from_pretrained(folder)
    scaled = LlamaRotaryEmbedding(config).inv_freq
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    unscaled = LlamaRotaryEmbedding(config).inv_freq
    for right in (scaled, unscaled):  # old versions saved them before the scaling
        for first, then in product((torch.float32, torch.bfloat16, torch.float16), repeat=2):  # converted in memory, and again in the file
            add_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": right.to(first).to(then)})
            check_folder(folder)
    config.rope_parameters["rope_theta"] *= 1.05
    for wrong in (LlamaRotaryEmbedding(config).inv_freq, unscaled[1:].clone(), unscaled * 1.02, unscaled.long()):
        add_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": wrong})
        with pytest.raises(UserError, match="inv_freq in .* must be the frequencies of the rotary settings, such as rope_theta"):
            check_folder(folder)


def test_a_folder_with_files_of_two_models_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch, "--max-shard-size", 1e-5)
    check_folder(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config.json, and weights without its adapter; merge"):
        check_folder(folder)
    (folder / "adapter_config.json").unlink()
    save_file({"transformer.ln_f.weight": torch.ones(24)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="holds model.safetensors and model.safetensors.index.json, which are two models; delete one"):
        check_folder(folder)


def test_a_tensor_of_a_shard_that_the_index_does_not_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads all tensors of the files that the index names."""
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch, "--max-shard-size", 1e-5)
    path = min(folder.glob("model-*.safetensors"))
    whole = load_file(path)
    for found in (whole | {"lm_head.weight": torch.ones(VOCAB, 24)}, {"lm_head.weight": torch.ones(VOCAB, 24)}):
        save_file(found, path)
        with pytest.raises(UserError, match=f"only one of {path} and model.safetensors.index.json has .*; copy the model again"):
            check_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_in_other_elements_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, dtype: torch.dtype
) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch)
    found = load_file(folder / "model.safetensors")
    save_file({name: value.to(dtype) if "ln_f.weight" in name else value for name, value in found.items()}, folder / "model.safetensors")
    message = refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")
    assert f"transformer.ln_f.weight in {folder / 'model.safetensors'} is in {dtype}; save the model in fp16" in message


def test_pickled_weights_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")
    assert "pickled files (.bin) are never opened" in message
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"\x80\x04\x95" * 9)
    assert "cannot be read" in refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")


def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch)
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")
    assert "lm_head.weight" in message and "the name of a file in the folder" in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    folder = exported(tmp_path, small_gpt(kv_channels=8), monkeypatch)
    (folder / ("config.json" if name == "config.json" else "model.safetensors")).unlink()
    os.mkfifo(folder / name)
    message = refusal(convert_from_hf, monkeypatch, capsys, "--input", folder, "--output", tmp_path / "back")
    assert f"{name} cannot be read (it is a pipe, not a regular file); copy it again" in message


@pytest.mark.parametrize("name", [name for name, (_, changes) in MODELS.items() if "apply_layernorm_1p" not in changes])
def test_the_configuration_comes_back_from_their_config_json(name: str) -> None:
    model = small_config(**{"num_query_groups": 3, "kv_channels": 8, **MODELS[name][1]})
    layout = layout_holding(model)
    found = asdict(model_of(layout.config_json(model, VOCAB, Boundaries())))
    elsewhere = ("make_vocab_size_divisible_by", "seq_length")
    assert {key: found[key] for key in found if key not in elsewhere} == {
        key: value for key, value in asdict(model).items() if key not in elsewhere
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({**NO_BIASES, "swiglu": False, "squared_relu": True}, "llama has no --squared-relu"),
        ({**NO_BIASES, "swiglu": False}, "llama has no GELU without --swiglu"),
        ({**NO_BIASES, "rotary_percent": 0.6}, "llama has no --rotary-percent 0.6"),
        ({**NO_BIASES, "rotary_interleaved": True}, "llama has no --rotary-interleaved"),
        ({**NO_BIASES, "normalization": "LayerNorm"}, "llama has no --normalization LayerNorm"),
        ({**NO_BIASES, "qk_layernorm": True, "add_qkv_bias": True}, "qwen2 has no --qk-layernorm; qwen3 has no --add-qkv-bias"),
        ({**NO_BIASES, "num_attention_heads": 5, "num_query_groups": 5}, "llama has no --num-attention-heads 5 that does not divide"),
        ({"kv_channels": 8, "position_embedding_type": "none"}, "gpt2 has no --position-embedding-type none"),
    ],
)
def test_an_architecture_that_no_layout_holds_is_refused_by_its_flags(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match="cannot be converted") as error:
        layout_holding(small_config(**changes))
    assert words in str(error.value)


LLAMA_JSON = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3}
LLAMA_JSON |= {"max_position_embeddings": 16, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act must be "silu" or "swish"'),
        ({"mlp_bias": True}, "mlp_bias must be what attention_bias is"),
        ({"attention_bias": True}, "mlp_bias must be what attention_bias is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type must be default, linear or llama3"),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "yarn"}},
            "must be left out beside rope_parameters",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window must be false"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias must be false"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias must be false"),
        (
            {"model_type": "mistral", "max_position_embeddings": 4097},
            "sliding_window must be null, or a window of all 4097",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8},
            "sliding_window must be null, or a window of all 16",
        ),
    ],
)
def test_a_llama_whose_function_is_another_is_refused_with_the_reason(change: dict[str, Any], words: str) -> None:
    config = LLAMA_JSON | change
    if change.get("attention_bias") and "model_type" not in change:
        config |= {"mlp_bias": False}
    with pytest.raises(UserError, match="config.json: .*; correct it.") as error:
        model_of(config)
    assert words in str(error.value)


def test_both_forms_of_rotary_parameters_are_read() -> None:
    older = LLAMA_JSON | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    newer = LLAMA_JSON | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    found = [model_of(config) for config in (older, newer)]
    assert found[0] == found[1]
    assert (found[0].rotary_base, found[0].rotary_seq_len_interpolation_factor) == (5e5, 2.0)
