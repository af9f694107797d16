"""What of a checkpoint a run takes, by its flags, and what it may change of the model then."""

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
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.training.stored_run import StoredRun, with_schedule
from megatron_zpp.zero.policy import KEPT_WEIGHT

FOLDER = Path("saved/iter_0000003")
ROPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --use-rotary-position-embeddings --train-iters 5"
LONGER = "--seq-length 32 --rotary-base 500000"


def config_of(flags: str) -> Config:
    return resolve(parse_flags(f"{ROPE} {flags}".split()), 1, None)


def stored(config: Config, *, is_release: bool = False) -> StoredRun:
    manifest = manifest_of_run(config_of(""), 128)
    return StoredRun.of(config.checkpoint, FOLDER, replace(manifest, run={}) if is_release else manifest)


@pytest.mark.parametrize(
    ("flags", "consumed_samples", "gives_moments"),
    [
        ("--load saved", 12, True),
        ("--load saved --no-load-optim", 12, False),
        ("--load saved --skip-train", 12, False),
        ("--load saved --finetune", 0, False),
        ("--load other --pretrained-checkpoint saved", 0, False),
        ("--pretrained-checkpoint saved", 0, False),
    ],
)
def test_what_is_taken_is_what_the_flags_say(flags: str, consumed_samples: int, gives_moments: bool) -> None:
    config = config_of(flags)
    assert (stored(config).consumed_samples, stored(config).gives_moments(config)) == (consumed_samples, gives_moments)
    release = stored(config, is_release=True)
    assert (release.consumed_samples, release.gives_moments(config)) == (0, False)


@pytest.mark.parametrize("flags", ["--finetune", "--no-load-optim"])
def test_weights_go_on_in_a_longer_context_with_a_warning_and_a_whole_run_does_not(flags: str) -> None:
    words = "--rotary-base 10000.0 there and 500000.0 here"
    whole, weights = config_of(f"--load saved {LONGER}"), config_of(f"--load saved {LONGER} {flags}")
    units = ModelShape(whole.model, 128).unit_specs()
    with pytest.raises(CheckpointError, match=words):
        stored(whole).check_contents(whole, units)
    stored(weights).check_contents(weights, units)
    assert stored(weights).notices(weights) == [f"WARNING: the weights were trained with other rotary positions: {words}"]
    same = config_of("--load saved --seq-length 32")
    stored(same).check_contents(same, units)
    assert stored(same).notices(same) == []


def test_a_run_without_its_optimizer_state_is_refused() -> None:
    config = config_of("--load saved")
    manifest = replace(manifest_of_run(config, 128), states={"weight": "F32"})
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        StoredRun.of(config.checkpoint, FOLDER, manifest).check_contents(config, ModelShape(config.model, 128).unit_specs())


@pytest.mark.parametrize(
    ("flags", "batch", "saved_at", "start"),
    [
        ("", 4, 20, 50),
        ("", 8, 20, 20 + 40),  # 320 of 400 samples are left
        ("", 2, 20, 20 + 10),
        ("", 2, 30, 30),  # it is over
        ("", 2, 60, 50),
        ("--diloco-start-iteration 25", 8, 20, 25),
        ("--finetune", 8, 20, 50),
    ],
)
def test_outer_steps_of_a_resumed_run_begin_where_its_warmup_ends(flags: str, batch: int, saved_at: int, start: int) -> None:
    """The run before had batches of 4 samples."""
    schedule = "--train-iters 10000 --lr-warmup-iters 50 --override-opt-param-scheduler"
    islands = f"--load saved {schedule} --diloco-sync-period 16 --global-batch-size"
    manifest = manifest_of_run(config_of(f"{islands} 4"), 128, saved_at, 4 * saved_at)
    config = config_of(f"{islands} {batch} {flags}")
    found = with_schedule(config, StoredRun.of(config.checkpoint, FOLDER, manifest), 1)
    assert found.diloco.diloco_start_iteration == start


@pytest.mark.parametrize(
    "batches",
    [
        "--global-batch-size 8",
        "--global-batch-size 10 --micro-batch-size 4 --decrease-batch-size-if-needed",
        "--global-batch-size 32 --rampup-batch-size 4 4 600",
        "--global-batch-size 8 --lr-warmup-iters 0 --lr-warmup-fraction 0.0101",
    ],
)
def test_outer_steps_begin_where_they_would_have_begun_without_an_interruption(batches: str) -> None:
    config = config_of(f"--load saved --train-iters 10000 --lr-warmup-iters 50 --diloco-sync-period 16 {batches}")
    schedule = running_schedule(config, 1)
    for saved_at in (1, 10, 49, 50, 200):
        manifest = manifest_of_run(config, 128, saved_at, schedule.samples_after(saved_at))
        found = with_schedule(config, StoredRun.of(config.checkpoint, FOLDER, manifest), 1)
        assert found.diloco.diloco_start_iteration == config.diloco.diloco_start_iteration


DIFFERENCES = "--load saved --bf16 --zero-stage 2 --ranks-per-node 1 --zero-quantized-weight-differences"


@pytest.mark.parametrize(
    ("flags", "element_type", "gives_copies"),
    [
        (DIFFERENCES, "BF16", True),
        (f"{DIFFERENCES} --zero-quantized-weight-differences-bits 1", "BF16", False),
        (DIFFERENCES, "F16", False),
        (DIFFERENCES, None, False),
        (f"{DIFFERENCES} --no-load-optim", "BF16", False),
        ("--load saved --bf16", "BF16", False),
    ],
)
def test_copies_of_the_weights_are_taken_only_with_the_same_code_and_dtype(
    flags: str, element_type: str | None, gives_copies: bool
) -> None:
    def in_world(words: str) -> Config:
        return resolve(parse_flags(f"{ROPE} {words}".split()), 2, 1)

    manifest = manifest_of_run(in_world(DIFFERENCES), 128)
    if element_type is not None:
        manifest = replace(manifest, states={**manifest.states, KEPT_WEIGHT: element_type})
    config = in_world(flags)
    run = StoredRun.of(config.checkpoint, FOLDER, manifest)
    assert run.gives_copies(config) == gives_copies
    begins_anew = "differences" in flags and "no-load-optim" not in flags and not gives_copies
    assert any("the copies begin as its main weights" in line for line in run.notices(config)) == begins_anew
