"""--use-checkpoint-args: flags, then the checkpoint, then defaults."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.checkpoint.release import write_release
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.groups.data import CHANGED_TOKENIZERS, TOKENIZER_FIELDS, TOKENIZER_TYPES
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config, DataConfig, ModelConfig
from megatron_zpp.data.tokenizers import tokenizer
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec

UNITS = [UnitSpec("u", (ParamSpec("w", Division.undivided((3,)), lambda start, stop: torch.zeros(stop - start), weight_decay=False),))]
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=2,
    ffn_hidden_size=50,
    kv_channels=12,
    num_query_groups=2,
    seq_length=7,
    max_position_embeddings=9,
)
LLAMA = replace(
    MODEL,
    num_query_groups=1,
    position_embedding_type="rope",
    rotary_base=5e5,
    rotary_percent=0.5,
    rotary_interleaved=True,
    use_rope_scaling=True,
    rope_scaling_factor=32.0,
    normalization="RMSNorm",
    qk_layernorm=True,
    swiglu=True,
    disable_bias_linear=True,
    add_qkv_bias=True,
    untie_embeddings_and_output_weights=True,
)
DATA = DataConfig(tokenizer_type="NullTokenizer", vocab_size=77, null_tokenizer_eod_id=0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_release(tmp_path, UNITS, lambda name: torch.zeros(3), {"model": asdict(MODEL), "data": asdict(DATA)})
    return tmp_path


def merged(flags: str) -> Config:
    return resolve(with_checkpoint_args(parse_flags(f"--use-checkpoint-args --train-iters 5 --lr 1 {flags}".split())), 1, None)


def test_the_checkpoint_fills_what_flags_leave_open(directory: Path) -> None:
    config = merged(f"--load {directory}")
    assert config.model == MODEL
    assert (config.data.tokenizer_type, config.data.vocab_size, config.data.null_tokenizer_eod_id) == ("NullTokenizer", 77, 0)
    assert any(notice.startswith(f"--use-checkpoint-args: from {directory / 'release'}") for notice in config.notices)


def test_an_architecture_comes_whole_but_for_how_it_is_computed(tmp_path: Path) -> None:
    flags = asdict(replace(LLAMA, attention_backend="flash", norm_backend="apex"))
    write_release(tmp_path, UNITS, lambda name: torch.zeros(3), {"model": flags, "data": asdict(DATA)})
    config = merged(f"--load {tmp_path} --attention-backend unfused --num-key-value-heads 2")
    assert config.model == replace(LLAMA, attention_backend="unfused", num_query_groups=2)


def test_flags_of_other_architectures_are_not_said_to_have_no_effect(directory: Path) -> None:
    assert not any("has no effect" in notice for notice in merged(f"--load {directory}").notices)


def test_a_flag_goes_before_the_checkpoint_also_where_it_is_the_default(directory: Path) -> None:
    config = merged(f"--load {directory} --seq-length 8 --attention-dropout 0.1 --ffn-hidden-size 60 --norm-epsilon 1e-6")
    assert (config.model.seq_length, config.model.ffn_hidden_size, config.model.norm_epsilon) == (8, 60, 1e-6)
    assert config.model.num_layers == 3


def test_another_tokenizer_takes_nothing_of_the_checkpoints(directory: Path) -> None:
    config = merged(f"--load {directory} --tokenizer-type NullTokenizer --vocab-size 99 --mock-data")
    assert config.data.vocab_size == 99


def test_the_files_of_a_tokenizer_go_before_a_checkpoint_without_one(directory: Path) -> None:
    config = merged(f"--load {directory} --data-path corpus --vocab-file vocab.json --merge-file merges.txt")
    assert config.model == MODEL
    assert (config.data.tokenizer_type, config.data.vocab_size) == ("GPT2BPETokenizer", None)


TOKENIZERS = {
    "NullTokenizer": DATA,
    "GPT2BPETokenizer": DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="vocab.json", merge_file="merges.txt"),
    "SentencePieceTokenizer": DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model="a.model"),
    "GPTSentencePieceTokenizer": DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model="a.model"),
    "Llama2Tokenizer": DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model="a.model"),
    "HuggingFaceTokenizer": DataConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model="folder", tokenizer_hf_no_include_special_tokens=True
    ),
    "HFTokenizer": DataConfig(tokenizer_type="HFTokenizer", tokenizer_model="tokenizer.json"),
    "TikTokenizer": DataConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model="a.tiktoken",
        tiktoken_pattern="v2",
        tiktoken_num_special_tokens=10,
        tokenizer_special_tokens=("<unk>", "<s>", "</s>", "<pad>"),
    ),
}
EARLIER_TOKENIZERS = {
    "SentencePieceTokenizer": replace(TOKENIZERS["SentencePieceTokenizer"], legacy_tokenizer=True, vocab_extra_ids=100),
    "Llama2Tokenizer": replace(TOKENIZERS["Llama2Tokenizer"], legacy_tokenizer=True),
}


def write_flags(directory: Path, data: DataConfig, without: tuple[str, ...] = ()) -> None:
    """A release that has these flags, but for those named in `without`."""
    flags = {name: value for name, value in asdict(data).items() if name not in without}
    write_release(directory, UNITS, lambda name: torch.zeros(3), {"model": asdict(MODEL), "data": flags})


def test_there_is_a_case_for_each_tokenizer() -> None:
    assert TOKENIZERS.keys() == set(TOKENIZER_TYPES) and EARLIER_TOKENIZERS.keys() == set(CHANGED_TOKENIZERS)


@pytest.mark.parametrize("data", [*TOKENIZERS.values(), *EARLIER_TOKENIZERS.values()], ids=lambda data: data.tokenizer_type)
def test_a_tokenizer_comes_with_all_that_it_is_built_from(tmp_path: Path, data: DataConfig) -> None:
    write_flags(tmp_path, replace(data, vocab_size=77))
    config = merged(f"--load {tmp_path} --data-path corpus")
    assert replace(config.data, data_path=()) == replace(data, vocab_size=77)
    assert not any("has no effect" in notice for notice in config.notices)
    if data.tokenizer_type != "NullTokenizer":  # which has no files
        given = merged(f"--load {tmp_path} --data-path corpus --tokenizer-model elsewhere --vocab-file v --merge-file m")
        files = {"tokenizer_model": "elsewhere", "vocab_file": "v", "merge_file": "m"}
        assert given.data == replace(config.data, **files)


def test_every_flag_that_a_tokenizer_is_built_from_is_taken() -> None:
    read = set(re.findall(r"(?<![\w.])data\.(\w+)", inspect.getsource(tokenizer)))
    assert read == set(TOKENIZER_FIELDS)


@pytest.mark.parametrize("data", EARLIER_TOKENIZERS.values(), ids=EARLIER_TOKENIZERS)
def test_a_checkpoint_from_before_there_were_two_generations_of_a_tokenizer_gives_the_earlier_one(tmp_path: Path, data: DataConfig) -> None:
    write_flags(tmp_path, data, without=("legacy_tokenizer",))
    assert merged(f"--load {tmp_path} --data-path corpus").data.legacy_tokenizer


def test_what_recomputes_is_not_the_checkpoints_business(directory: Path) -> None:
    assert merged(f"--load {directory} --checkpoint-activations").model.recompute_granularity == "full"


def test_pretrained_weights_give_the_shape_until_there_is_a_checkpoint(directory: Path) -> None:
    flags = f"--load {directory / 'none'} --pretrained-checkpoint {directory}"
    assert merged(flags).model == MODEL


def test_without_a_checkpoint_the_flags_have_to_do(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="--num-layers, --hidden-size, .* must be given"):
        merged(f"--load {tmp_path}")
    config = merged(f"--load {tmp_path} --num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 4")
    assert "--use-checkpoint-args: there is no checkpoint yet, the flags decide" in config.notices


def test_a_value_of_the_checkpoint_that_breaks_a_rule_is_named_with_its_source(directory: Path) -> None:
    source = f"--max-position-embeddings is from {directory}"
    with pytest.raises(FlagError, match=f"--max-position-embeddings 9 is below --seq-length 10.*{source}"):
        merged(f"--load {directory} --seq-length 10")


def test_a_damaged_checkpoint_is_a_mistake_that_is_named(directory: Path) -> None:
    (directory / "release" / "complete.json").write_text("{}")
    with pytest.raises(FlagError, match="--use-checkpoint-args: .*complete.json lacks manifest_bytes: the checkpoint is damaged"):
        merged(f"--load {directory}")
