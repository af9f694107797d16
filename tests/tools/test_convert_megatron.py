"""From Megatron: files of every format give the logits of the model that they were made from, bit for bit."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import convert_from_megatron
import pytest
import torch
from generate_text import load_model, open_checkpoint
from harness.megatron_files import (
    ITERATION,
    ROWS,
    SAMPLES,
    core_names,
    old_names,
    random_model,
    write_deepspeed,
    write_legacy,
    write_pipeline,
    write_torch_dist,
    zero_stage_3,
)
from harness.small_gpt import LLAMA, VOCAB
from torch import Tensor

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.gpt import GPT

GPT2 = {"num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": GPT2,
    "GPT-2, exact GELU, untied": {**GPT2, "no_bias_gelu_fusion": True, "untie_embeddings_and_output_weights": True},
    "gains minus 1, squared ReLU": {**GPT2, "apply_layernorm_1p": True, "squared_relu": True},
    "Llama": LLAMA,
    "Qwen3, tied": LLAMA | {"qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    "Qwen2": LLAMA | {"add_qkv_bias": True},
}
Writer = Callable[..., Path]
FORMATS: dict[str, Writer] = {
    "torch": write_legacy,
    "torch, norms apart": partial(write_legacy, names=partial(core_names, is_fused=False)),
    "torch, before the core": partial(write_legacy, names=old_names, version=2),
    "torch, file of before torch 1.6": partial(write_legacy, names=old_names, version=2, _use_new_zipfile_serialization=False),
    "torch_dist": write_torch_dist,
    "torch_dist, layers apart": partial(write_torch_dist, is_stacked=False, has_common_file=False),
    "DeepSpeed": write_deepspeed,
    "DeepSpeed, pipeline": partial(write_deepspeed, kind="pipeline"),
    "DeepSpeed, stage 3": partial(write_deepspeed, kind="stage 3"),
}
# Every format with two tensor ranks, and with one; every model.
NAMES = list(MODELS)
CASES = sorted({(form, "Llama", 2) for form in FORMATS} | {(form, NAMES[index % len(NAMES)], 1) for index, form in enumerate(FORMATS)})


def convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Runs the tool in this process, which saves the start of another."""
    monkeypatch.setattr(sys, "argv", ["convert_from_megatron.py", *map(str, arguments)])
    convert_from_megatron.main()


def logits(model: GPT) -> Tensor:
    tokens = torch.randint(VOCAB, (3, model.config.seq_length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model.eval()(tokens, None, first_sample=0)


def imported(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> GPT:
    convert(monkeypatch, "--input", source, "--output", tmp_path / "imported", *arguments)
    return load_model(open_checkpoint(tmp_path / "imported", None))


@pytest.mark.parametrize("form, name, ranks", CASES)
def test_an_imported_model_has_the_logits_of_the_one_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, name: str, ranks: int
) -> None:
    model = random_model(**MODELS[name])
    source = FORMATS[form](tmp_path / "megatron", model, ranks)
    found = imported(tmp_path, source, monkeypatch)
    assert found.config.num_query_groups == model.config.key_value_heads
    assert torch.equal(logits(found), logits(model))
    assert logits(model).abs().max() > 1  # large enough that a mistake would show


def by_kind(rows: Tensor) -> Tensor:
    """From today's order to that of version 0: all queries, all keys, all values of a rank; heads of 10 channels."""
    return torch.cat([torch.cat([head[10 * kind : 10 * kind + 10] for head in rows.split(30)]) for kind in range(3)])


def by_channel(rows: Tensor) -> Tensor:
    """To the order of version 1: of each channel of each head its query, key and value."""
    order = [30 * head + 10 * kind + channel for head in range(len(rows) // 30) for channel in range(10) for kind in range(3)]
    return rows[order]


@pytest.mark.parametrize("version, order", [(None, by_kind), (0, by_kind), (1.0, by_channel)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_old_checkpoints_come_into_today_s_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: float | None, order: Callable[[Tensor], Tensor], ranks: int
) -> None:
    model = random_model(**GPT2)
    source = write_legacy(tmp_path / "megatron", model, ranks, names=old_names, version=version, order=order)
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))


def test_gains_minus_1_are_known_by_either_name_of_their_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM of 2026 stores --apply-layernorm-1p under the name of its configuration."""
    model = random_model(**GPT2, apply_layernorm_1p=True)
    source = write_legacy(tmp_path / "megatron", model, changes={"apply_layernorm_1p": None, "layernorm_zero_centered_gamma": True})
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))


def test_fp32_weights_of_the_optimizer_are_taken_where_they_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(**GPT2)
    source = write_torch_dist(tmp_path / "megatron", model, 2, dtype=torch.bfloat16, with_main_weights=True)
    assert not torch.equal(logits(random_model(torch.bfloat16, **GPT2)), logits(model))
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))


def test_a_parameter_without_fp32_weights_does_not_cost_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The optimizer has none of a frozen parameter."""
    model = random_model(**GPT2)
    source = write_torch_dist(tmp_path / "megatron", model, 2, dtype=torch.bfloat16, with_main_weights=True)
    path = source / f"iter_{ITERATION:07d}" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["chained_0.optimizer.state.fp32_param.decoder.final_layernorm.weight"]
    path.write_bytes(pickle.dumps(metadata))
    with torch.no_grad():
        model.final.norm.weight.copy_(model.final.norm.weight.bfloat16())
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))
    assert "are the fp32 ones of the optimizer, but not of final.norm.weight, which it does not have" in capsys.readouterr().out


@pytest.mark.parametrize("write", [write_legacy, write_torch_dist, write_deepspeed])
def test_weights_of_16_bits_keep_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Writer) -> None:
    model = random_model(torch.bfloat16, **GPT2)
    source = write(tmp_path / "megatron", model, dtype=torch.bfloat16)
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))


def test_pipeline_ranks_with_virtual_stages_make_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(num_layers=8, **GPT2)
    source = write_pipeline(tmp_path / "megatron", model)
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))


def test_the_padding_of_the_vocabulary_can_be_cut_off_and_another_put_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(**MODELS["GPT-2, exact GELU, untied"])
    source = write_legacy(tmp_path / "megatron", model, 2)
    found = imported(tmp_path, source, monkeypatch, "--vocab-size", VOCAB, "--make-vocab-size-divisible-by", 16 + 64)
    assert found.padded_vocab_size == 80 != ROWS
    assert torch.equal(found.embedding.word.weight[VOCAB:], model.embedding.word.weight[:VOCAB].mean(0).expand(80 - VOCAB, -1))
    assert torch.equal(logits(found)[..., :VOCAB], logits(model)[..., :VOCAB])


def test_a_run_takes_the_model_from_the_imported_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(**MODELS["Qwen3, tied"])
    imported(tmp_path, write_torch_dist(tmp_path / "megatron", model, 2), monkeypatch)
    flags = ["--load", str(tmp_path / "imported"), "--use-checkpoint-args", "--micro-batch-size", "1", "--train-iters", "1"]
    config = resolve(with_checkpoint_args(parse_flags(flags)), world_size=1, local_world_size=1)
    for name in ("num_layers", "kv_channels", "num_query_groups", "swiglu", "qk_layernorm", "normalization", "position_embedding_type"):
        assert getattr(config.model, name) == getattr(model.config, name)
    assert config.model.padded_vocab_size == ROWS


def test_a_dry_run_lists_what_becomes_what_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_legacy(tmp_path / "megatron", random_model(**MODELS["Llama"]), 2)
    convert(monkeypatch, "--input", source, "--output", tmp_path / "imported", "--dry-run")
    printed = capsys.readouterr().out
    file = source / f"iter_{ITERATION:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    assert f"iteration {ITERATION}, {SAMPLES} samples, 2 tensor ranks" in printed
    assert "--num-layers 2 --hidden-size 24" in printed and "--swiglu" in printed
    assert f"blocks.1.mlp.up.weight [80x24] from decoder.layers.1.mlp.linear_fc1.weight in {file} (of 2 ranks: halves of rows)\n" in printed
    assert not (tmp_path / "imported").exists()


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: Path, *more: object) -> str:
    """The error of the tool, which ends with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        convert(monkeypatch, "--input", source, "--output", source / "imported", *more)
    assert caught.value.code == 2
    assert not (source / "imported" / "latest_checkpointed_iteration.txt").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, finding",
    [
        ({"num_experts": 8}, "its arguments have num_experts 8, which this model does not compute"),
        ({"use_mup": True, "mup_embedding_mult": 10.0}, "its arguments have use_mup True, which this model does not compute"),
        ({"softmax_scale": 0.5}, "its arguments have softmax_scale 0.5, which this model does not compute"),
        ({"window_size": (4, 0)}, "its arguments have window_size, which this model does not compute"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type yarn, which this model does not compute"),
        ({"normalization": "L2"}, "normalization L2, which is none of LayerNorm, RMSNorm"),
        ({"num_layers": 3}, "the checkpoint has 2 layers, its arguments say 3"),
        ({"num_layers": 10**12}, "its arguments describe a model that cannot be: --num-layers 1000000000000 is out of range"),
        ({"num_layers": "2"}, "its arguments have num_layers 2, where a whole number from 1 is needed"),
        ({"hidden_size": 32}, "has shape (64, 24), its arguments say (64, 32)"),
        ({"untie_embeddings_and_output_weights": True}, "lacks final.head.weight"),
        ({"add_bias_linear": False}, "which the model of its arguments does not have"),
        ({"num_query_groups": 3, "group_query_attention": True}, "--num-query-groups 3 does not divide --num-attention-heads 4"),
        ({"tensor_model_parallel_size": 2}, "has files of 1 tensor rank, its arguments say 2"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused_with_the_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], finding: str
) -> None:
    source = write_legacy(tmp_path / "megatron", random_model(**GPT2), changes=changes)
    assert finding in refusal(monkeypatch, capsys, source)


def test_a_tensor_of_another_model_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def names(model: GPT) -> dict[str, Tensor]:
        return core_names(model) | {"decoder.layers.0.mlp.router.weight": torch.zeros(2)}

    source = write_legacy(tmp_path / "megatron", random_model(**GPT2), names=names)
    assert "tensors that this model does not have, so it cannot be imported: decoder.layers.0.mlp.router.weight" in refusal(
        monkeypatch, capsys, source
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
@pytest.mark.parametrize("write", [write_legacy, write_torch_dist])
def test_weights_in_other_elements_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: Writer, dtype: torch.dtype
) -> None:
    error = refusal(monkeypatch, capsys, write(tmp_path / "megatron", random_model(**GPT2), dtype=dtype))
    assert " is not in fp16, bf16, fp32 or fp64, so it cannot be imported" in error and ".weight" in error


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    model = random_model(**GPT2)
    with torch.no_grad():
        dict(model.named_parameters())["final.norm.weight"][3] = value
    source = write_legacy(tmp_path / "megatron", model)
    assert "final.norm.weight has values that are NaN or infinite" in refusal(monkeypatch, capsys, source)


def test_a_checkpoint_without_an_embedding_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def names(model: GPT) -> dict[str, Tensor]:
        return {name: value for name, value in core_names(model).items() if "word_embeddings" not in name}

    source = write_legacy(tmp_path / "megatron", random_model(**GPT2), names=names)
    assert "the checkpoint has no embedding.word.weight; copy the whole checkpoint" in refusal(monkeypatch, capsys, source)


@pytest.mark.parametrize("file", ["mp_rank_01/model_optim_rng.pt", "mp_rank_00/model_optim_rng.pt"])
def test_a_file_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    source = write_legacy(tmp_path / "megatron", random_model(**GPT2), 2)
    (source / f"iter_{ITERATION:07d}" / file).unlink()
    assert f"{Path(file).parent} has no model_optim_rng.pt" in refusal(monkeypatch, capsys, source)


def test_a_difference_between_tensor_ranks_is_named_and_the_first_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(**GPT2)
    source = write_legacy(tmp_path / "megatron", model, 2)
    path = source / f"iter_{ITERATION:07d}" / "mp_rank_01" / "model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    saved["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(saved, path)
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))
    assert "WARNING: 1 parameter differs between tensor ranks; taken from rank 0: final.norm.weight" in capsys.readouterr().out


def changed(source: Path, pattern: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """The checkpoint after a change of the files of this pattern."""
    for path in source.rglob(pattern):
        saved = torch.load(path, weights_only=False)
        change(saved)
        torch.save(saved, path)
    return source


def legacy_with_tied_head(folder: Path, model: GPT, head: Tensor) -> Path:
    """As Megatron-LM before the core: the last stage has the copy under a name of its own."""
    source = write_legacy(folder, model, names=old_names, version=2)
    return changed(source, "model_optim_rng.pt", lambda saved: saved["model"].update(word_embeddings_for_head={"weight": head}))


def stages_with_tied_head(folder: Path, model: GPT, head: Tensor, name: str = "output_layer.weight") -> Path:
    def change(saved: dict[str, Any]) -> None:
        if saved["model1"].pop("output_layer.weight", None) is not None:
            saved["model1"][name] = head

    return changed(write_pipeline(folder, model), "mp_rank_00_001/model_optim_rng.pt", change)


def deepspeed_pipeline_with_tied_head(folder: Path, model: GPT, head: Tensor) -> Path:
    """Beside the copy there are positions, which the head does not use, and which are not trained there."""
    last = f"layer_{model.config.num_layers + 3:02d}-model_00-model_states.pt"
    positions = torch.zeros_like(model.embedding.position.weight)
    change = {"word_embeddings.weight": head, "position_embeddings.weight": positions}
    return changed(write_deepspeed(folder, model, kind="pipeline"), last, lambda saved: saved.update(change))


@pytest.mark.parametrize(
    "write",
    [
        legacy_with_tied_head,
        stages_with_tied_head,
        partial(stages_with_tied_head, name="embedding.word_embeddings.weight"),
        deepspeed_pipeline_with_tied_head,
    ],
)
def test_a_tied_head_is_left_out_if_it_is_the_embedding_and_refused_if_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: Writer
) -> None:
    monkeypatch.setattr("megatron_zpp.checkpoint.hf.rules.COMPARED_NUMEL", 100)  # a few rows
    model = random_model(num_layers=4, **GPT2)
    head = model.embedding.word.weight.detach().clone()
    source = write(tmp_path / "megatron", model, head)
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))
    head[ROWS - 1, 2] += 1.5
    message = refusal(monkeypatch, capsys, write(tmp_path / "other", model, head))
    assert "word_embeddings.weight in " in message and "to which it is tied, by up to 1.5; copy the whole checkpoint again" in message
    message = refusal(monkeypatch, capsys, write(tmp_path / "shorter", model, head[1:].clone()))
    assert f"has shape ({ROWS - 1}, 24), and " in message


@pytest.mark.parametrize("write", [write_legacy, write_torch_dist, write_pipeline])
def test_rotary_frequencies_are_left_out_if_they_are_those_of_the_arguments_and_refused_if_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: Writer
) -> None:
    """As Megatron computed them when they were a buffer that it saved: 1 / base ^ (2 i / channels)."""
    model = random_model(num_layers=4, **{**MODELS["Qwen3, tied"], "rotary_percent": 0.8})
    for name, base in (("right", 1e4), ("wrong", 1e4 * 1.02)):
        buffer = {"rotary_pos_emb.inv_freq": 1.0 / base ** (torch.arange(0, 8, 2).float() / 8)}
        if write is write_torch_dist:
            monkeypatch.setattr("harness.megatron_files.core_names", lambda model, added=buffer: core_names(model) | added)
            source = write(tmp_path / name, model)
        else:
            source = changed(write(tmp_path / name, model), "model_optim_rng.pt", partial(add_to_models, buffer))
        if name == "right":
            assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))
    assert "rotary_pos_emb.inv_freq in " in (message := refusal(monkeypatch, capsys, source))
    assert "are not the rotary frequencies of its arguments" in message


def add_to_models(added: dict[str, Tensor], saved: dict[str, Any]) -> None:
    for name in {"model", "model0", "model1"} & saved.keys():
        saved[name].update(added)


def test_a_parameter_that_two_pipeline_ranks_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(num_layers=4, **GPT2)
    gain = {"decoder.final_layernorm.weight": torch.ones(24)}
    source = changed(
        write_pipeline(tmp_path / "megatron", model), "mp_rank_00_000/model_optim_rng.pt", lambda saved: saved["model0"].update(gain)
    )
    assert "is also decoder.final_layernorm.weight in " in refusal(monkeypatch, capsys, source)


@pytest.mark.parametrize(
    "name, finding",
    [
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "lacks files zero_pp_rank_*_mp_rank_00_optim_states.pt"),
        ("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", "has other numbers of values than the parameters"),
    ],
)
def test_a_data_rank_of_stage_3_that_is_missing_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, finding: str
) -> None:
    source = write_deepspeed(tmp_path / "megatron", random_model(**GPT2), kind="stage 3")
    (source / f"global_step{ITERATION}" / name).unlink()
    assert finding in refusal(monkeypatch, capsys, source)


@pytest.mark.parametrize(
    "files, member, finding",
    [
        ("*_model_states.pt", "args", "has no arguments of a run of Megatron-DeepSpeed; choose"),
        ("*_optim_states.pt", "zero_stage", "has no fp32_flat_groups of ZeRO stage 3; choose"),
        ("*_optim_states.pt", "fp32_flat_groups", "has no fp32_flat_groups of ZeRO stage 3; choose"),
    ],
)
def test_a_file_of_deepspeed_that_lacks_a_member_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: str, member: str, finding: str
) -> None:
    source = write_deepspeed(tmp_path / "megatron", random_model(**GPT2), kind="stage 3")
    for path in source.rglob(files):
        with zero_stage_3(by_name=False):
            saved = torch.load(path, weights_only=False)
            del saved.get("optimizer_state_dict", saved)[member]
            torch.save(saved, path)
    assert finding in refusal(monkeypatch, capsys, source)


@pytest.mark.parametrize("stage_by_name", [False, True])
def test_stage_3_is_known_however_python_pickles_an_enumeration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage_by_name: bool
) -> None:
    """Python 3.11.0 to 3.11.3 store the name of a member, others its value."""
    model = random_model(**GPT2)
    source = write_deepspeed(tmp_path / "megatron", model, kind="stage 3", stage_by_name=stage_by_name)
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))


def test_a_call_in_a_checkpoint_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model, where a checkpoint may have objects of any kind."""

    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'trace'}",)

    model = random_model(**GPT2)
    source = write_legacy(tmp_path / "megatron", model, changes={"timers": Call()})
    assert torch.equal(logits(imported(tmp_path, source, monkeypatch)), logits(model))
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "change, finding",
    [
        ({"relative_path": "../outside.distcp"}, "names a file that is not in the folder"),
        ({"relative_path": "/etc/passwd"}, "names a file that is not in the folder"),
        ({"offset": -1}, "has chunks in a form that this program does not read"),
        ({"length": 2**62}, "it is incomplete"),
        ({"length": 10}, "is damaged or incomplete"),
        ({"transform_descriptors": ["zstd"]}, "has chunks in a form that this program does not read"),
    ],
)
def test_a_chunk_outside_of_its_file_or_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: dict[str, Any], finding: str
) -> None:
    source = write_torch_dist(tmp_path / "megatron", random_model(**GPT2))
    path = source / f"iter_{ITERATION:07d}" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, **change)
    path.write_bytes(pickle.dumps(metadata))
    assert finding in refusal(monkeypatch, capsys, source)


def test_metadata_of_more_tensors_or_bytes_than_any_model_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_torch_dist(tmp_path / "megatron", random_model(**GPT2))
    path = source / f"iter_{ITERATION:07d}" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    stacked = next(name for name in metadata.state_dict_metadata if name.startswith("decoder.layers."))
    metadata.state_dict_metadata[stacked].size = torch.Size((2**62, 2))
    path.write_bytes(pickle.dumps(metadata))
    monkeypatch.setattr("megatron_zpp.checkpoint.megatron.torch_dist.MOST_NAMES", 100)
    assert "describes more than 100 tensors" in refusal(monkeypatch, capsys, source)
    monkeypatch.setattr("megatron_zpp.checkpoint.megatron.torch_dist.MOST_METADATA_BYTES", 100)
    assert f"has {path.stat().st_size} bytes, more than 100" in refusal(monkeypatch, capsys, source)


def test_chunks_that_leave_gaps_or_overlap_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_torch_dist(tmp_path / "megatron", random_model(**GPT2), 2)
    path = source / f"iter_{ITERATION:07d}" / ".metadata"
    whole = path.read_bytes()
    for count, finding in ((1, "lacks chunks"), (3, "has chunks that overlap")):
        metadata = pickle.loads(whole)
        chunks = metadata.state_dict_metadata["embedding.word_embeddings.weight"].chunks
        chunks[:] = (chunks * 2)[:count]
        path.write_bytes(pickle.dumps(metadata))
        assert finding in refusal(monkeypatch, capsys, source)


def test_a_folder_without_a_checkpoint_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no checkpoint of the latest iteration" in refusal(monkeypatch, capsys, tmp_path)
    assert "has no checkpoint of iteration 3" in refusal(monkeypatch, capsys, tmp_path, "--ckpt-step", 3)
    (tmp_path / "latest").write_text("../elsewhere")
    assert "has no checkpoint of the latest iteration" in refusal(monkeypatch, capsys, tmp_path)
    (tmp_path / "latest").write_text("x" * 300)
    assert f"{tmp_path / 'latest'} has more than 200 bytes" in refusal(monkeypatch, capsys, tmp_path)
    (tmp_path / "latest").write_text("global_step1")
    (tmp_path / "global_step1").mkdir()
    assert "has neither .metadata nor" in refusal(monkeypatch, capsys, tmp_path)
