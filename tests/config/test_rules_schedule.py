"""Lengths, batches and schedules that contradict each other are named at start-up; the others are resolved."""

from __future__ import annotations

import pytest

from megatron_zpp.config.batch_schedule import batch_schedule, horizons, length_in_samples, running_schedule
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.rules_schedule import check_batches
from megatron_zpp.config.schema import Config

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1"
DATA = "--tokenizer-type NullTokenizer --vocab-size 9"
WSD = "--lr-decay-style wsd"
RAMP = "--rampup-batch-size 4 4 24 --global-batch-size 16"


def resolved(flags: str, world_size: int = 1, steps: str | None = None) -> Config:
    words = [*SHAPE.split(), *flags.split()] + (["--step-batch-size-schedule", steps] if steps is not None else [])
    return resolve(parse_flags(words), world_size, world_size)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train-tokens 99 --lr-decay-iters 5", ["--lr-decay-iters 5", "--train-tokens counts in samples", "use --lr-decay-samples"]),
        ("--train-iters 5 --train-tokens 99 --global-batch-size 8", ["--train-tokens 99 is less than one global batch"]),
        ("--train-iters 5 --lr-decay-iters 3 --lr-decay-tokens 99", ["--lr-decay-iters 3 and --lr-decay-tokens 99", "give one"]),
        ("--train-iters 5 --lr-decay-tokens 99 --lr-warmup-iters 400", ["warmup of 400 samples does not end before", "--lr-decay-tokens"]),
        ("--train-samples 50 --lr-decay-tokens 9 --lr-decay-samples 9", ["--lr-decay-samples 9", "--lr-decay-tokens 9", "give one"]),
        ("--train-samples 50 --lr-warmup-tokens 9 --lr-warmup-samples 9", ["--lr-warmup-samples 9", "--lr-warmup-tokens 9", "give one"]),
        ("--train-iters 5 --lr-warmup-fraction 0 --lr-warmup-iters 2", ["--lr-warmup-fraction 0.0", "--lr-warmup-iters 2", "give one"]),
        (f"--train-iters 5 {WSD}", ["--lr-decay-style WSD", "give --lr-wsd-decay-iters"]),
        (f"--train-samples 5 {WSD}", ["give --lr-wsd-decay-samples"]),
        (f"--train-samples 5 {WSD} --lr-wsd-decay-iters 3", ["--lr-wsd-decay-iters 3", "use --lr-wsd-decay-samples"]),
        ("--train-iters 5 --lr-wsd-decay-style cosine", ["--lr-wsd-decay-style cosine", "without --lr-decay-style WSD"]),
        (
            f"--train-iters 9 --lr-warmup-iters 4 {WSD} --lr-wsd-decay-iters 6",
            ["--lr-wsd-decay-iters 6 begins before the warmup ends", "9 samples", "takes 4", "annealing 6", "--lr-decay-iters"],
        ),
        ("--train-iters 5 --start-weight-decay 0", ["--start-weight-decay 0.0", "--weight-decay-incr-style linear or cosine"]),
        ("--train-iters 5 --weight-decay-incr-style linear --end-weight-decay 1", ["needs both ends", "give --start-weight-decay"]),
        ("--train-iters 5 --rampup-batch-size 4 4 24", ["--rampup-batch-size 4 4 24", "give --global-batch-size"]),
        ("--train-iters 5 --iterations-to-skip 3 0", ["--iterations-to-skip 3 0 has 0", "from 1 on"]),
        ("--train-iters 5 --iterations-to-skip 3 -4", ["-4"]),
        ("--train-iters 5 --skip-train --eval-iters 0", ["--skip-train with --eval-iters 0"]),
        ("--train-iters 5 --full-validation --eval-iters 0", ["--full-validation and --eval-iters 0"]),
        ("--train-iters 5 --manual-gc-interval 3", ["--manual-gc-interval 3 changes nothing without --manual-gc"]),
        ("--train-iters 5 --no-manual-gc-eval", ["--no-manual-gc-eval changes nothing without --manual-gc"]),
        ("--train-iters 5 --multiple-validation-sets", ["--multiple-validation-sets needs validation data"]),
        ("--train-iters 5 --full-validation", ["--full-validation needs validation data"]),
        (f"--train-iters 5 --validation-set-names a {DATA}", ["--validation-set-names a changes nothing"]),
        (
            f"--train-iters 5 --full-validation --train-data-path a {DATA}",
            ["--full-validation needs validation data; give --valid-data-path"],
        ),
        (
            f"--train-iters 5 --multiple-validation-sets --train-data-path a --valid-data-path 1 b 2 c {DATA}",
            ["--multiple-validation-sets takes every validation corpus whole", "give validation prefixes without weights"],
        ),
        (
            f"--train-iters 5 --multiple-validation-sets --validation-set-names x x --data-path a b c {DATA}",
            ["--validation-set-names x x has 1 different names for 3 corpora"],
        ),
        (
            "--train-iters 5 --eval-micro-batch-size 3 --global-batch-size 4",
            ["--eval-global-batch-size 4", "--eval-micro-batch-size 3", "choose 3 or 6"],
        ),
    ],
)
def test_flags_that_contradict_each_other_are_named(flags: str, words: list[str]) -> None:
    with pytest.raises(FlagError) as error:
        resolved(flags)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("flags", "steps", "words"),
    [
        (RAMP, "0:8", ["--step-batch-size-schedule", "--rampup-batch-size 4 4 24", "exclude each other"]),
        ("--global-batch-size 4", "0:8", ["--step-batch-size-schedule", "ends with another size than --global-batch-size 4; leave that"]),
        ("", "0:8 4K:9", ['--step-batch-size-schedule "0:8 4K:9" has batches of 9 samples', "not a multiple of 2", "choose 8 or 10"]),
        (
            "--rampup-batch-size 3 1 30 --global-batch-size 4",
            None,
            [
                "--rampup-batch-size 3 1 30 has batches of 3 samples",
                "START and INCREMENT must be multiples of 2, for example --rampup-batch-size 2 2 30.",
            ],
        ),
        (
            "--rampup-batch-size 1 1 30 --global-batch-size 2 --decrease-batch-size-if-needed",
            None,
            ["batches of 1 sample,", "leave --rampup-batch-size out, because no batch can be smaller."],
        ),
        (
            "--rampup-batch-size 1 1 30 --global-batch-size 3",
            None,
            ["leave --rampup-batch-size out and give --global-batch-size 2, because no batch can be smaller."],
        ),
    ],
)
def test_batches_that_two_ranks_cannot_have_are_named(flags: str, steps: str | None, words: list[str]) -> None:
    with pytest.raises(FlagError) as error:
        resolved(f"--train-iters 5 {flags}", 2, steps)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("ramp", "full_size", "example"),
    [
        ("100 84 5859375", 1024, "--rampup-batch-size 128 128 5859375."),
        ("300 1 1000", 1024, "--rampup-batch-size 256 128 1000."),
        ("128 64 100000", 1152, "--rampup-batch-size 128 128 100000."),
        ("100 263 1000", 1152, "--rampup-batch-size 128 512 1000."),
        ("1000 1 1000", 1001, "--rampup-batch-size 896 128 1000 --global-batch-size 896."),
        ("10 10 1000", 300, "--rampup-batch-size 128 128 1000 --global-batch-size 256."),
    ],
)
def test_a_ramp_that_does_not_fit_is_answered_with_one_that_does(ramp: str, full_size: int, example: str) -> None:
    given = f"--train-iters 5 --micro-batch-size 1 --global-batch-size {full_size} --rampup-batch-size {ramp}"
    with pytest.raises(FlagError, match=r"must be multiples of 128, for example") as error:
        resolved(given, 128)
    assert str(error.value).endswith(example)
    resolved(f"{given} {example.removesuffix('.')}", 128)


def test_a_warmup_as_long_as_the_decay_says_which_number_it_must_be_below() -> None:
    with pytest.raises(FlagError, match=r"^--lr-warmup-iters 20 must be below --lr-decay-iters, 10 \(by default --train-iters\); choose 9"):
        resolved("--train-iters 10 --lr-warmup-iters 20")


def test_an_evaluation_alone_needs_no_batch_of_training() -> None:
    config = resolved("--train-iters 5 --global-batch-size 4 --skip-train --eval-global-batch-size 6", 3)
    assert config.training.eval_global_batch_size == 6
    with pytest.raises(FlagError, match="--eval-global-batch-size 4 is not a multiple of 3"):
        resolved("--train-iters 5 --global-batch-size 4 --skip-train", 3)


def test_batches_of_the_past_do_not_stop_a_run_that_goes_on_with_more_ranks() -> None:
    config = resolved(f"--train-iters 9 {RAMP} --load somewhere", world_size=8)
    batches = running_schedule(config, 8)
    check_batches(config, batches, 24)
    with pytest.raises(FlagError, match="has batches of 4 samples, not a multiple of 8"):
        check_batches(config, batches, 0)


@pytest.mark.parametrize(
    ("flags", "world_size", "samples", "iterations"),
    [
        # 4 4 8 12 and then 16: 28 samples in the ramp, 4 whole batches more in 100.
        (f"--train-samples 100 {RAMP}", 4, 100, 8),
        (f"--train-iters 8 {RAMP}", 4, 28 + 4 * 16, 8),
        (f"--train-tokens 3199 {RAMP}", 4, 100, 8),
        (f"--train-tokens 3199 --train-samples 30 {RAMP}", 4, 30, 4),
        (f"--train-tokens 3199 --train-samples 3000 {RAMP}", 4, 100, 8),
        # On 3 ranks the same sizes become 3, 6, 12 and 15: 3 3 3 6 6 12 up to sample 33, and 4 more.
        (f"--train-samples 100 {RAMP} --decrease-batch-size-if-needed", 3, 100, 10),
        ("--train-samples 100 --global-batch-size 16", 4, 100, 6),
    ],
)
def test_the_length_of_a_run_counts_its_batches(flags: str, world_size: int, samples: int, iterations: int) -> None:
    config = resolved(flags, world_size)
    assert length_in_samples(config.training, batch_schedule(config.training, config.sample_lengths)) == samples
    assert config.training.train_iters == iterations


def test_steps_of_the_batch_end_at_the_size_that_everything_else_calls_the_global_batch() -> None:
    training = resolved("--train-iters 9", 2, "0:4 1K:8").training
    assert (training.global_batch_size, training.eval_global_batch_size, training.eval_micro_batch_size) == (8, 8, 1)


def test_horizons_in_iterations_count_the_samples_of_their_batches() -> None:
    config = resolved(f"--train-iters 8 --lr-warmup-iters 3 --lr-decay-iters 6 {RAMP}", 4)
    found = horizons(config.optimizer, config.training, config.sample_lengths)
    assert (found.warmup_samples, found.decay_samples, found.annealing_samples) == (16, 28 + 2 * 16, 0)


def test_horizons_in_tokens_are_whole_samples() -> None:
    config = resolved("--train-tokens 3200 --lr-warmup-tokens 33 --lr-decay-tokens 1600 --lr-decay-style WSD --lr-wsd-decay-samples 10")
    found = horizons(config.optimizer, config.training, config.sample_lengths)
    assert (found.warmup_samples, found.decay_samples, found.annealing_samples) == (2, 50, 10)


def test_weight_decay_changes_over_the_length_of_training_unless_told_otherwise() -> None:
    flags = "--train-iters 10 --global-batch-size 4 --weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.1"
    assert resolved(flags).optimizer.weight_decay_incr_samples == 40
    assert resolved(f"{flags} --weight-decay-incr-samples 8").optimizer.weight_decay_incr_samples == 8
    constant = resolved("--train-iters 10 --weight-decay 0.3").optimizer
    assert (constant.start_weight_decay, constant.end_weight_decay) == (0.3, 0.3)


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        (
            "--weight-decay 0.2 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
            "--weight-decay has no effect with --weight-decay-incr-style linear",
        ),
        ("--skip-train", "--skip-train without --load evaluates the initial weights"),
        ("--lr-decay-style inverse-square-root", "without a warmup falls as 1 / sqrt(samples) from the first sample on"),
    ],
)
def test_what_changes_nothing_or_surprises_is_noticed(flags: str, notice: str) -> None:
    assert any(notice in line for line in resolved(f"--train-iters 5 {flags}").notices)


@pytest.mark.parametrize(("tokens", "iterations"), [(16 * 8 * 3, 3), (16 * 8 * 3 + 1, 3), (16 * 8 * 90, 5)])
def test_iterations_with_tokens_stop_at_the_shorter_and_decay_over_the_iterations(tokens: int, iterations: int) -> None:
    config = resolved(f"--seq-length 16 --train-iters 5 --train-tokens {tokens} --global-batch-size 8")
    assert (config.training.train_iters, config.training.train_samples, config.optimizer.lr_decay_iters) == (iterations, None, 5)


def test_a_schedule_in_tokens_fits_a_length_in_iterations() -> None:
    flags = "--seq-length 16 --train-iters 50 --global-batch-size 8 --lr-decay-tokens 5120 --lr-warmup-tokens 640"
    config = resolved(flags)
    found = horizons(config.optimizer, config.training, config.sample_lengths)
    assert (found.warmup_samples, found.decay_samples) == (40, 320)


def test_steps_of_the_batch_may_come_with_the_size_they_end_at() -> None:
    assert resolved("--train-iters 5 --global-batch-size 8", 2, "0:4 4K:8").training.global_batch_size == 8


@pytest.mark.parametrize("split", ["a", "1,2,3,4", "'0,0,0'"])
def test_a_split_that_no_corpus_can_have_is_refused_before_anything_starts(split: str) -> None:
    with pytest.raises(FlagError, match="--split .* found"):
        resolved(f"--train-iters 5 --split {split}")
