"""Which rules a run takes over from its checkpoint or its corpora, where today's default is another."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from harness.stored_manifest import manifest_of_run
from harness.tiny_corpus import write_corpus
from harness.trained_tokenizers import MODEL_SIZE, write_sentencepiece_model

from megatron_zpp.checkpoint.manifest import CheckpointError, Manifest
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.training.kept_rules import with_kept_rules
from megatron_zpp.training.start import flags_that_differ
from megatron_zpp.training.stored_run import StoredRun

FOLDER = Path("saved/iter_0000003")
SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 5 --load saved"
LLAMA = "--tokenizer-type Llama2Tokenizer --tokenizer-model m"
BLEND = f"--data-path 0.6 a 0.4 b {LLAMA}"
ONCE = "samples are dealt to corpora as in the checkpoint's run: --blend-normalization once"
TANH = "--openai-gelu: the checkpoint was trained with the tanh form of GELU"
EARLIER_LLAMA = "--legacy-tokenizer: the checkpoint's run had the earlier Llama2Tokenizer"


def config_of(flags: str) -> Config:
    return resolve(parse_flags(f"{SMALL} {flags}".split()), 1, None)


def before_the_flags(manifest: Manifest) -> Manifest:
    """The manifest as it was written before there were flags for these rules."""
    flags = copy.deepcopy(dict(manifest.flags))
    for group, names in {"data": ("legacy_tokenizer", "blend_normalization"), "model": ("openai_gelu", "no_bias_gelu_fusion")}.items():
        for name in names:
            del flags[group][name]
    return replace(manifest, flags=flags)


def stored(config: Config, *, is_older: bool) -> StoredRun:
    manifest = manifest_of_run(config, 128)
    return StoredRun.of(config.checkpoint, FOLDER, before_the_flags(manifest) if is_older else manifest)


@pytest.mark.parametrize(
    ("flags", "is_older", "rule", "notices"),
    [
        (BLEND, True, ("once", True, False), (ONCE, EARLIER_LLAMA)),
        (BLEND, False, ("twice", False, False), ()),
        (f"{BLEND} --blend-normalization twice --legacy-tokenizer", True, ("twice", True, False), ()),
        (f"{BLEND} --finetune", True, ("twice", True, False), (EARLIER_LLAMA,)),
        (f"--data-path a b {LLAMA} --legacy-tokenizer", True, ("once", True, False), ()),
        ("--disable-bias-linear", True, ("once", False, True), (TANH,)),
        ("--disable-bias-linear", False, ("twice", False, False), ()),
        ("--disable-bias-linear --swiglu", True, ("once", False, False), ()),
    ],
)
def test_a_run_keeps_the_rules_of_its_checkpoint_unless_flags_are_given(
    flags: str, is_older: bool, rule: tuple[str, bool, bool], notices: tuple[str, ...]
) -> None:
    config = config_of(flags)
    kept = with_kept_rules(config, stored(config, is_older=is_older))
    data, model = kept.config.data, kept.config.model
    assert (data.blend_normalization, data.legacy_tokenizer, model.openai_gelu) == rule
    assert kept.notices == notices


def test_a_new_run_has_todays_rules() -> None:
    config = config_of(BLEND)
    assert with_kept_rules(config, None) == (config, ())
    assert config.data.blend_normalization == "twice"


def test_what_was_recorded_is_kept_by_the_next_run_too() -> None:
    config = config_of(BLEND)
    resumed = with_kept_rules(config, stored(config, is_older=True)).config
    again = with_kept_rules(config, stored(resumed, is_older=False))
    assert (again.config.data, again.notices) == (resumed.data, (ONCE, EARLIER_LLAMA))


def test_another_rule_than_the_checkpoints_is_named_when_it_is_given() -> None:
    theirs = manifest_of_run(config_of(f"{BLEND} --blend-normalization once"), 128).flags
    assert flags_that_differ(config_of(BLEND), theirs) == ["--blend-normalization once there and twice here"]


def test_a_corpus_that_ends_documents_with_eod_keeps_the_earlier_sentencepiece_tokenizer(tmp_path: Path) -> None:
    model = write_sentencepiece_model(tmp_path / "tiny.model")
    eod = MODEL_SIZE + 2  # after <CLS> and <SEP>
    for end, is_earlier in ((eod, True), (2, False)):
        corpus = write_corpus(tmp_path, [[5, 6, end]] * 3, name=f"ends{end}")
        for size in ("", f"--vocab-size {MODEL_SIZE}"):
            config = config_of(f"--data-path {corpus} --tokenizer-type SentencePieceTokenizer --tokenizer-model {model} {size}")
            kept = with_kept_rules(config, None)
            assert kept.config.data.legacy_tokenizer == is_earlier
            assert bool(kept.notices) == is_earlier


def test_corpora_decide_about_the_tokenizer_of_a_run_that_takes_only_weights(tmp_path: Path) -> None:
    model = write_sentencepiece_model(tmp_path / "tiny.model")
    corpus = write_corpus(tmp_path, [[5, 6, MODEL_SIZE + 2]] * 3)
    flags = f"--data-path {corpus} --tokenizer-type SentencePieceTokenizer --tokenizer-model {model}"
    for weights_only, is_earlier in (("--finetune", True), ("", False)):
        config = config_of(f"{flags} {weights_only}")
        assert with_kept_rules(config, stored(config, is_older=False)).config.data.legacy_tokenizer == is_earlier


def test_weights_are_not_trained_with_another_gelu_than_before() -> None:
    exact, by_tanh = config_of("--no-bias-gelu-fusion"), config_of("")
    units = ModelShape(exact.model, 128).unit_specs()
    stored(exact, is_older=False).check_contents(exact, units)
    with pytest.raises(CheckpointError, match="GELU exact there and by tanh here"):
        stored(exact, is_older=False).check_contents(by_tanh, units)
    kept = with_kept_rules(exact, stored(exact, is_older=True)).config
    stored(exact, is_older=True).check_contents(kept, units)
