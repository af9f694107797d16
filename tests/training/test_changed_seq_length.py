"""A run that goes on with another --seq-length counts the tokens that its samples had, where a length is given in tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from harness.stored_manifest import manifest_of_run

from megatron_zpp.checkpoint.manifest import CheckpointError
from megatron_zpp.config.batch_schedule import running_schedule
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.training.lr_schedule import LearningRateSchedule
from megatron_zpp.training.start import with_earlier_samples, with_remaining_batches
from megatron_zpp.training.stored_run import StoredRun, with_schedule
from megatron_zpp.training.weight_decay import WeightDecaySchedule

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 --eval-iters 0 --load saved --mock-data"
SAVED_AT, CONSUMED = 20, 80  # 20 iterations of 4 samples of 32 tokens
LONGER = "--seq-length 64"
TOKENS_BEFORE = CONSUMED * 32


def config_of(flags: str) -> Config:
    return resolve(parse_flags(f"{SHAPE} --global-batch-size 4 --seq-length 32 {flags}".split()), 1, 1)


def stored(flags: str) -> StoredRun:
    """The checkpoint of the run with samples of 32 tokens, as programs wrote it that did not say what it had read."""
    config = config_of(flags)
    return StoredRun.of(config.checkpoint, Path("saved/iter_0000020"), manifest_of_run(config, 50304, SAVED_AT, CONSUMED))


def resumed(flags: str, run: StoredRun) -> Config:
    given = parse_flags(f"{SHAPE} --global-batch-size 4 --seq-length 32 {flags}".split())
    config = with_schedule(with_earlier_samples(resolve(given, 1, 1), given, run, Launch(0, 1, 0, 1)), run, 1)
    return with_remaining_batches(config, run.progress(0), 1)


def learning_rate(config: Config, run: StoredRun, iterations: int = 0) -> float:
    """Of the step after so many further ones."""
    schedule, progress = LearningRateSchedule.from_config(config.optimizer, config.training, config.sample_lengths), run.progress(0)
    for _ in range(iterations):
        progress.advance(4, config.model.seq_length, is_skipped=False)
    return schedule.learning_rate(progress.scheduled(schedule.tokens_per_sample))


def test_consumed_tokens_are_those_that_the_samples_had() -> None:
    progress = stored("--train-tokens 10240").progress(0)
    assert (progress.consumed_samples, progress.consumed_tokens, progress.scheduled_tokens) == (80, 2560, 2560)
    for _ in range(20):
        progress.advance(4, 64, is_skipped=False)
    assert (progress.consumed_samples, progress.consumed_tokens) == (160, 7680)


def test_a_length_in_tokens_ends_when_so_many_tokens_are_consumed() -> None:
    run = stored("--train-tokens 10240")
    config = resumed(f"--train-tokens 10240 {LONGER}", run)
    assert config.training.train_iters == 20 + (10240 - TOKENS_BEFORE) // (4 * 64) == 50
    assert resumed("--train-tokens 10240", run).training.train_iters == 80
    assert resumed(f"--train-iters 90 --train-tokens 10240 {LONGER} --override-opt-param-scheduler", run).training.train_iters == 50


@pytest.mark.parametrize("decay", ["", "--lr-decay-tokens 8192"])
def test_a_decay_in_tokens_goes_on_where_it_was_and_ends_at_its_token(decay: str) -> None:
    flags = f"--train-tokens 10240 --lr 1 --lr-decay-style linear --lr-warmup-tokens 1024 {decay}"
    run, end = stored(flags), 8192 if decay else 10240
    before, after = config_of(flags), resumed(f"{flags} {LONGER}", run)
    assert learning_rate(before, run) == learning_rate(after, run) == 1 - (2560 - 1024) / (end - 1024)
    assert learning_rate(after, run, 8) == 1 - (2560 + 8 * 256 - 1024) / (end - 1024)
    assert learning_rate(after, run, (end - 2560) // 256) == 0


def test_a_checkpoint_whose_flags_do_not_say_that_the_decay_counts_tokens_has_the_schedule_of_its_length_in_tokens() -> None:
    flags = "--train-tokens 10240 --lr 1 --lr-decay-style linear --lr-warmup-tokens 1024"
    run = stored(flags)
    older = {**run.manifest.flags, "optimizer": {**run.manifest.flags["optimizer"], "lr_decay_tokens": None}}
    run = replace(run, manifest=replace(run.manifest, flags=older))
    after = resumed(f"{flags} {LONGER}", run)
    assert learning_rate(after, run) == learning_rate(config_of(flags), run)
    assert resumed(flags, run).training.train_iters == 80


def test_a_warmup_in_tokens_goes_on_where_it_was() -> None:
    flags = "--train-tokens 20480 --lr 1 --lr-warmup-tokens 5120"
    run = stored(flags)
    after = resumed(f"{flags} {LONGER}", run)
    assert [learning_rate(config, run) for config in (config_of(flags), after)] == [0.5, 0.5]
    assert [learning_rate(after, run, iterations) for iterations in (5, 10)] == [0.75, 1.0]


def test_a_warmup_in_tokens_ends_at_its_token_also_before_a_decay_in_iterations() -> None:
    flags = "--train-iters 90 --lr 1 --lr-warmup-tokens 5120"
    run = stored(flags)
    after = resumed(f"{flags} {LONGER}", run)
    assert learning_rate(after, run, 9) < learning_rate(after, run, 10) == 1


def test_weight_decay_over_a_training_in_tokens_goes_on_where_it_was() -> None:
    flags = "--train-tokens 10240 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"
    run, progress = stored(flags), stored(flags).progress(0)
    schedules = [
        WeightDecaySchedule.from_config(config.optimizer, config.training, config.sample_lengths)
        for config in (config_of(flags), resumed(f"{flags} {LONGER}", run))
    ]
    assert [schedule.weight_decay(progress.scheduled(schedule.tokens_per_sample)) for schedule in schedules] == [0.25, 0.25]


def test_a_batch_schedule_in_tokens_grows_at_its_token() -> None:
    flags = "--train-iters 90 --step-batch-size-schedule 0:2,1280:4,5120:8".replace("--global-batch-size 4", "")
    given = f"{SHAPE} --seq-length 32 {flags}".split()
    config = resolve(parse_flags(given), 1, 1)
    run = StoredRun.of(config.checkpoint, Path("saved/iter_0000020"), manifest_of_run(config, 50304, SAVED_AT, CONSUMED))
    unresolved = parse_flags([*given, *LONGER.split()])
    after = with_earlier_samples(resolve(unresolved, 1, 1), unresolved, run, Launch(0, 1, 0, 1))
    sizes = running_schedule(after, 1)
    assert [stage.start for stage in sizes.stages] == [0, 1280 // 32, 80 + (5120 - 2560) // 64]
    assert [sizes.batch_size(consumed) for consumed in (80, 116, 120)] == [4, 4, 8]


@pytest.mark.parametrize("decay", ["--lr-decay-style linear", "--lr-decay-tokens 8192"])
def test_the_schedule_of_the_checkpoint_goes_on_too(decay: str) -> None:
    flags = f"--train-tokens 10240 --lr 1 --lr-warmup-tokens 1024 {decay}"
    run = stored(flags)
    same = resumed(f"{flags} {LONGER}", run)
    theirs = resumed(f"--train-tokens 10240 --lr 0.5 {LONGER} --use-checkpoint-opt-param-scheduler", run)
    for iterations in (0, 8, 16):
        assert learning_rate(theirs, run, iterations) == learning_rate(same, run, iterations)


def test_lengths_in_iterations_and_samples_stay_those_of_samples() -> None:
    flags = "--train-iters 90 --lr 1 --lr-decay-style linear"
    run = stored(flags)
    after = resumed(f"{flags} {LONGER}", run)
    assert after.training.train_iters == 90
    assert learning_rate(after, run) == learning_rate(config_of(flags), run) == 1 - 20 / 90


def test_a_checkpoint_whose_flags_lack_the_length_of_a_sample_is_refused() -> None:
    run = stored("--train-tokens 10240")
    for length in ({}, {"seq_length": "32"}, {"seq_length": 0}, {"seq_length": True}):
        flags = {**run.manifest.flags, "model": length}
        with pytest.raises(CheckpointError, match="seq_length .*; give --finetune"):
            _ = replace(run, manifest=replace(run.manifest, flags=flags)).earlier_samples
