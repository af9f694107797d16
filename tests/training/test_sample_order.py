"""A run that goes on takes the next samples in the order of its checkpoint, whatever its batches, its ranks and its length are."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from harness.stored_manifest import manifest_of_run
from harness.tiny_corpus import counting_documents, write_corpus
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.checkpoint.manifest import CheckpointError
from megatron_zpp.config.batch_schedule import batch_schedule, length_in_samples, running_schedule
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.data.build_once import SILENT
from megatron_zpp.data.sampler import MicroBatchSampler
from megatron_zpp.training import setup
from megatron_zpp.training.sample_order import order_notices, ordered_samples, read_samples
from megatron_zpp.training.stored_run import StoredRun

FOLDER = Path("saved/iter_0000008")
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --eval-iters 0 --lr 1 --load saved"
VOCABULARY = setup.Vocabulary(9000, 9088, 8999)
MOCK = "--mock-data"


def config_of(flags: str, ranks: int = 1) -> Config:
    return resolve(parse_flags(f"{SHAPE} --lr-decay-style constant {flags}".split()), ranks, ranks)


def saved(config: Config, iteration: int, stored: StoredRun | None = None, ranks: int = 1) -> StoredRun:
    """The checkpoint of this iteration of the run of `config`, which goes on from `stored`."""
    began, consumed = (0, 0) if stored is None else (stored.manifest.iteration, stored.consumed_samples)
    consumed = running_schedule(config, ranks).samples_after(iteration - began, consumed)
    manifest = manifest_of_run(config, VOCABULARY.padded_size, iteration, consumed)
    run = {**manifest.run, "ordered_samples": ordered_samples(config, stored)}
    return StoredRun.of(config.checkpoint, FOLDER, replace(manifest, run=run))


def without_count(stored: StoredRun) -> StoredRun:
    """The checkpoint as programs wrote it that did not count what they put in order."""
    run = {name: value for name, value in stored.manifest.run.items() if name != "ordered_samples"}
    return replace(stored, manifest=replace(stored.manifest, run=run))


def samples(config: Config, stored: StoredRun | None, iterations: int, ranks: int = 1) -> tuple[list[int], list[list[int]]]:
    """Numbers of the training samples of the run's next iterations in the training data, and their tokens, in order."""
    train = setup.build_run_data(config, VOCABULARY, stored, SILENT, checks_token_ids=False).train
    first = 0 if stored is None else stored.consumed_samples
    size = config.training.micro_batch_size
    of_ranks = [MicroBatchSampler(len(train), first, size, rank, ranks) for rank in range(ranks)]
    micro_batches = (running_schedule(config, ranks).samples_after(iterations, first) - first) // (size * ranks)
    steps = zip(*(islice(sampler, micro_batches) for sampler in of_ranks), strict=True)
    numbers = [number for step in steps for indices in step for number in indices.samples]
    return numbers, [train[number]["tokens"].tolist() for number in numbers]


@pytest.fixture
def blend(tmp_path: Path) -> str:
    """Flags of a weighted blend of two corpora. The first has some 30 samples, so it is read repeatedly."""
    first, second = (
        write_corpus(tmp_path, counting_documents([10 + number % 7 for number in range(count)]), name=str(count)) for count in (40, 400)
    )
    return f"--data-path 0.4 {first} 0.6 {second} --split 1 --tokenizer-type NullTokenizer --vocab-size 9000"


@pytest.fixture(params=["mock data", "blend"])
def data(request: pytest.FixtureRequest, blend: str) -> str:
    return MOCK if request.param == "mock data" else blend


@pytest.mark.parametrize(("flags", "ranks", "batch"), [("--global-batch-size 8", 4, 8), ("", 2, 4), ("--global-batch-size 16", 2, 16)])
def test_no_sample_comes_twice_after_a_change_of_batch_or_ranks(data: str, flags: str, ranks: int, batch: int) -> None:
    whole = config_of(f"{data} --train-iters 12 --global-batch-size 16", ranks=4)
    numbers, tokens = samples(whole, None, 12, ranks=4)
    stored = saved(whole, 8, ranks=4)
    resumed = config_of(f"{data} --train-iters 12 {flags}", ranks=ranks)
    assert samples(resumed, stored, 4, ranks) == (numbers[128 : 128 + 4 * batch], tokens[128 : 128 + 4 * batch])
    assert numbers == list(range(192))
    assert order_notices(resumed, stored) == []


def test_the_order_stays_through_a_chain_of_runs_and_when_the_length_is_lowered(data: str) -> None:
    whole = config_of(f"{data} --train-iters 12 --global-batch-size 16")
    numbers, tokens = samples(whole, None, 12)
    second = config_of(f"{data} --train-iters 10 --global-batch-size 8")
    after_first = saved(whole, 4)
    after_second = saved(second, 7, after_first)
    assert samples(second, after_first, 3) == (numbers[64:88], tokens[64:88])
    third = config_of(f"{data} --train-iters 9 --global-batch-size 16")
    assert samples(third, after_second, 2) == (numbers[88:120], tokens[88:120])
    assert ordered_samples(third, after_second) == ordered_samples(whole, None) == 192
    assert read_samples(third, after_second) == 120


def test_a_run_that_needs_more_than_was_put_in_order_takes_new_numbers_and_says_what_may_come_again(data: str) -> None:
    stored = saved(config_of(f"{data} --train-iters 12 --global-batch-size 16"), 8)
    longer = config_of(f"{data} --train-iters 20 --global-batch-size 8")
    numbers, _ = samples(longer, stored, 12)
    assert numbers == list(range(128, 224))
    notices = order_notices(longer, stored)
    assert notices == [] if data == MOCK else "needs 224 samples, and the checkpoint's run had put 192 in order" in notices[0]
    assert order_notices(longer, saved(longer, 10, stored)) == []
    finetuned = config_of(f"{data} --train-iters 20 --global-batch-size 16 --finetune")
    assert order_notices(finetuned, replace(stored, weights_only=True)) == []


LENGTHS = {
    "iterations": "--train-iters 12 --global-batch-size 16",
    "a ramp": "--train-iters 12 --rampup-batch-size 4 4 60 --global-batch-size 16",
    "samples": "--train-samples 190 --global-batch-size 16",
    "decreased batches": "--train-iters 12 --global-batch-size 15 --decrease-batch-size-if-needed",
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_with_unchanged_flags_a_run_requests_what_it_did_before(length: str) -> None:
    config = config_of(f"{MOCK} {length}")
    asked = length_in_samples(config.training, batch_schedule(config.training, config.sample_lengths))
    assert ordered_samples(config, None) == asked
    for iteration in (1, 5, 11):
        stored = saved(config, iteration)
        assert ordered_samples(config, stored) == ordered_samples(config, without_count(stored)) == asked
        for flags in ("--finetune", "--skip-train --eval-iters 1"):
            other = config_of(f"{MOCK} {length} {flags}")
            assert ordered_samples(other, StoredRun.of(other.checkpoint, FOLDER, stored.manifest)) == asked


def test_a_checkpoint_that_does_not_say_it_has_the_order_of_its_flags() -> None:
    config = config_of(f"{MOCK} --train-iters 12 --global-batch-size 16")
    smaller = config_of(f"{MOCK} --train-iters 12 --global-batch-size 8")
    stored = without_count(saved(config, 8))
    assert stored.ordered_samples == ordered_samples(smaller, stored) == 192
    for flags in ({}, {**stored.manifest.flags, "training": {}}, {**stored.manifest.flags, "training": {"train_iters": "12"}}):
        with pytest.raises(CheckpointError, match="the checkpoint's flags lack the length .*--finetune"):
            _ = replace(stored, manifest=replace(stored.manifest, flags=flags)).ordered_samples


LEGS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5)


@given(LEGS)
def test_through_any_chain_of_runs_the_data_never_end_before_the_run(legs: list[tuple[int, int, int]]) -> None:
    """A leg is a run: half of its batch, the iterations to which it is to go on, and those after which it stops."""
    stored, ordered = None, 0
    for half, length, stopped in legs:
        began = 0 if stored is None else stored.manifest.iteration
        config = config_of(f"{MOCK} --train-iters {began + length} --global-batch-size {2 * half}")
        assert ordered_samples(config, stored) >= ordered
        ordered = ordered_samples(config, stored)
        stored = saved(config, began + min(length, stopped), stored)
        assert stored.consumed_samples <= saved(config, began + length, stored).consumed_samples <= ordered
