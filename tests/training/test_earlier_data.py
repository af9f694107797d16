"""A run that goes on with other data than its checkpoint's run says what comes again, and which documents change their split."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from harness.stored_manifest import manifest_of_run
from harness.tiny_corpus import write_corpus

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.data import read_again
from megatron_zpp.data.build_once import SILENT
from megatron_zpp.data.datasets import Datasets
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.monitor import available_memory
from megatron_zpp.training import setup
from megatron_zpp.training.earlier_data import data_notices, reading_of_run, with_reading
from megatron_zpp.training.sample_order import ordered_samples, read_samples
from megatron_zpp.training.stored_run import StoredRun

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 --eval-iters 1 --global-batch-size 4"
DATA = "--tokenizer-type NullTokenizer --vocab-size 30000 --load saved"
VOCABULARY = setup.Vocabulary(30000, 30080, 29999)
LENGTHS = np.random.default_rng(0).integers(5, 40, 1000).tolist()
WARNING = "WARNING: the training data or their order have changed "


class Run:
    """A run over its checkpoints: each leg goes on from the one before."""

    def __init__(self) -> None:
        self.stored: StoredRun | None = None
        self.consumed: Counter[int] = Counter()  # token ids, which are unique in the corpora here

    def leg(self, flags: str, iterations: int) -> list[str]:
        """Reads `iterations` batches of 4 samples and saves. Returns what the run said about its data when it began."""
        config = config_of(flags)
        datasets = setup.build_run_data(config, VOCABULARY, self.stored, SILENT, checks_token_ids=False)
        progress = Progress() if self.stored is None else self.stored.progress(0)
        here = reading_of_run(config, VOCABULARY, datasets, progress.consumed_samples)
        said = [] if self.stored is None else data_notices(config, self.stored, here, datasets)
        progress = with_reading(progress, here)
        for _ in range(iterations):
            self.consumed.update(self.tokens(datasets, progress.consumed_samples, progress.consumed_samples + 4))
            progress.advance(4, config.model.seq_length, is_skipped=False)
        manifest = manifest_of_run(config, VOCABULARY.padded_size, progress.iteration, progress.consumed_samples)
        run = {**manifest.run, "ordered_samples": ordered_samples(config, self.stored), "consumed_tokens": progress.consumed_tokens}
        run |= {
            "scheduled_tokens": progress.scheduled_tokens,
            "readings": json.loads(json.dumps([asdict(reading) for reading in progress.readings])),
        }
        self.stored = StoredRun.of(config.checkpoint, Path("saved/iter_0000001"), replace(manifest, run=run))
        return said

    def read_twice(self, flags: str) -> tuple[int, int]:
        """Of the tokens that the run reads from here on, how many it has read before, and all."""
        config = config_of(flags)
        datasets = setup.build_run_data(config, VOCABULARY, self.stored, SILENT, checks_token_ids=False)
        assert self.stored is not None
        rest = self.tokens(datasets, self.stored.consumed_samples, read_samples(config, self.stored))
        return sum(token in self.consumed for token in rest), len(rest)

    @staticmethod
    def tokens(datasets: Datasets, first: int, stop: int) -> list[int]:
        return [token for number in range(first, stop) for token in datasets.train[number]["tokens"].tolist()]


def config_of(flags: str) -> Config:
    return resolve(parse_flags(f"{SHAPE} {DATA} {flags}".split()), 1, 1)


def corpus(folder: Path, documents: int, name: str = "corpus", first_token: int = 0, lengths: list[int] = LENGTHS) -> str:
    """Documents whose tokens count up over the whole corpus, so that each is there once."""
    folder.mkdir(exist_ok=True)
    ends = np.cumsum(lengths[:documents]).tolist()
    tokens = [list(range(first_token + end - length, first_token + end)) for length, end in zip(lengths, ends, strict=False)]
    return write_corpus(folder, tokens, name=name)


def the_same(folder: Path) -> str:
    return f"--data-path {corpus(folder / 'a', 400)}"


def test_the_same_data_say_nothing_wherever_they_are(tmp_path: Path) -> None:
    common = "--seq-length 32 --train-iters 20 --split 80,10,10"
    run = Run()
    run.leg(f"{common} {the_same(tmp_path)}", 10)
    assert run.leg(f"{common} {the_same(tmp_path)}", 0) == []
    moved = f"--data-path {corpus(tmp_path / 'b', 400)} --data-cache-path {tmp_path / 'cache'}"
    assert run.leg(f"{common} {moved} --train-iters 30", 0) == []  # more samples of one epoch
    assert run.stored is not None and len(run.stored.readings) == 2
    assert run.leg(f"{common} {moved} --finetune", 0) == []


def test_a_corpus_made_again_with_more_documents_says_how_many_tokens_come_again_and_which_documents_change_their_split(
    tmp_path: Path,
) -> None:
    flags = "--seq-length 32 --train-iters 40 --split 80,10,10 --data-path"
    run = Run()
    run.leg(f"{flags} {corpus(tmp_path / 'a', 400)}", 20)
    longer = f"{flags} {corpus(tmp_path / 'b', 440)}"
    again, rest = run.read_twice(longer)
    assert 0 < again < rest == 20 * 4 * 32
    assert run.leg(longer, 0) == [
        f"{WARNING}(corpus has 400 documents there and 440 here): of the {rest} tokens that are read from here on, {again} were read "
        "before",
        "WARNING: 32 validation documents of the checkpoint's run are training documents now",
        "WARNING: the validation data have changed (corpus has 400 documents there and 440 here): losses are not comparable",
        "WARNING: the test data have changed (corpus has 400 documents there and 440 here): losses are not comparable",
    ]


CHANGES = {
    "another length of samples": "--seq-length 64 --data-path {a}",
    "another seed": "--seq-length 32 --seed 5 --data-path {a}",
    "a second corpus": "--seq-length 32 --data-path 1 {a} 1 {other}",
    "another share": "--seq-length 32 --data-path 3 {a} 1 {other}",
    "another split": "--seq-length 32 --data-path {a} --split 60,40,0",
    "more epochs": "--seq-length 32 --data-path {a} --train-iters 200",
}


@pytest.mark.parametrize("start", ["--data-path {a}", "--data-path 1 {a} 1 {other}"], ids=["one corpus", "a blend"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_tokens_that_come_again_are_counted_through_a_chain_of_changes(tmp_path: Path, start: str, change: str) -> None:
    names = {"a": corpus(tmp_path / "a", 400), "other": corpus(tmp_path / "a", 300, "other", 15000)}
    common = "--split 90,5,5 --train-iters 40"
    run = Run()
    run.leg(f"{common} --seq-length 32 {start.format(**names)}", 15)
    for flags in (f"{common} {change.format(**names)}", f"{common} --seq-length 16 {start.format(**names)}"):
        again, rest = run.read_twice(flags)
        said = run.leg(flags, 5)
        changed = [line for line in said if line.startswith(WARNING)]
        is_unchanged = "1 {a}" in start and change == CHANGES["a second corpus"] and "16" not in flags
        if not is_unchanged:
            assert changed[0].endswith(f": of the {rest} tokens that are read from here on, {again} were read before")
        assert len(changed) == (not is_unchanged)


def test_of_many_samples_a_part_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_again, "COUNTED_SAMPLES", 50)
    run = Run()
    run.leg(f"--seq-length 8 --split 1 --train-iters 300 --data-path {corpus(tmp_path / 'a', 400)}", 100)
    flags = f"--seq-length 8 --split 1 --train-iters 300 --data-path {corpus(tmp_path / 'b', 600)}"
    again, rest = run.read_twice(flags)
    (line,) = run.leg(flags, 0)
    share = float(line.rpartition(" about ")[2].split("%")[0]) / 100
    assert abs(share - again / rest) < 3 * (0.25 / 50) ** 0.5  # three standard deviations of a share of 50 samples


def test_a_corpus_replaced_under_its_name_is_named_because_its_tokens_cannot_be_counted(tmp_path: Path) -> None:
    flags = "--seq-length 32 --split 1 --train-iters 40 --data-path"
    run = Run()
    run.leg(f"{flags} {corpus(tmp_path / 'a', 400)}", 20)
    (line,) = run.leg(f"{flags} {corpus(tmp_path / 'b', 400, lengths=LENGTHS[400:])}", 0)
    assert line == (
        f"{WARNING}(corpus has other documents): of the 2560 tokens that are read from here on, 0 were read before; not "
        "counted: those of corpus, whose earlier documents are not all there"
    )


def test_a_corpus_that_grew_under_another_name_is_recognized(tmp_path: Path) -> None:
    flags = "--seq-length 32 --split 1 --train-iters 40 --data-path"
    run = Run()
    run.leg(f"{flags} {corpus(tmp_path / 'a', 400)}", 20)
    grown = f"{flags} {corpus(tmp_path / 'b', 440, 'grown')}"
    again, rest = run.read_twice(grown)
    (line,) = run.leg(grown, 0)
    changed = "corpus is left out, grown is new"
    assert line == f"{WARNING}({changed}): of the {rest} tokens that are read from here on, {again} were read before"


def test_a_corpus_that_lost_documents_under_another_name_is_not_counted(tmp_path: Path) -> None:
    flags = "--seq-length 32 --split 1 --train-iters 40 --data-path"
    run = Run()
    run.leg(f"{flags} {corpus(tmp_path / 'a', 440)}", 20)
    shorter = f"{flags} {corpus(tmp_path / 'b', 400, 'shorter')}"
    again, _ = run.read_twice(shorter)
    (line,) = run.leg(shorter, 0)
    assert again > 0 and line.endswith("; not counted: those of corpus, whose earlier documents are not all there")


def test_a_corpus_that_is_left_out_does_not_come_again(tmp_path: Path) -> None:
    first, second = corpus(tmp_path / "a", 400), corpus(tmp_path / "a", 300, "other", 15000)
    flags = "--seq-length 32 --split 1 --train-iters 40 --data-path"
    run = Run()
    run.leg(f"{flags} 1 {first} 1 {second}", 15)
    again, rest = run.read_twice(f"{flags} {second}")
    (line,) = run.leg(f"{flags} {second}", 0)
    assert line.endswith(f": of the {rest} tokens that are read from here on, {again} were read before")


def test_of_corpora_with_one_file_name_those_with_the_same_documents_are_compared(tmp_path: Path) -> None:
    names = [corpus(tmp_path / folder, count, "text", first) for folder, count, first in (("en", 400, 0), ("de", 300, 15000))]
    flags = "--seq-length 32 --split 1 --train-iters 40 --data-path"
    run = Run()
    run.leg(f"{flags} 1 {names[0]} 1 {names[1]}", 15)
    (line,) = run.leg(f"{flags} {names[1]}", 0)
    assert line.startswith(f"{WARNING}(text is left out, text has a share of 0.5 there and 1 here): of the ")


@pytest.mark.parametrize("changed", [False, True])
def test_many_corpora_are_read_once_and_only_if_something_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, changed: bool
) -> None:
    blend = " ".join(f"1 {corpus(tmp_path / 'a', 40 + number, f'corpus_{number}')}" for number in range(20))
    run, calls = Run(), Counter[str]()
    run.leg(f"--seq-length 32 --train-iters 40 --split 80,10,10 --data-path {blend}", 15)
    config = config_of(f"--seq-length 32 --train-iters 40 --split {'70' if changed else '80'},10,10 --data-path {blend}")
    datasets = setup.build_run_data(config, VOCABULARY, run.stored, SILENT, checks_token_ids=False)
    for name in ("lengths_digests", "beginnings_digest"):
        original = getattr(IndexedDataset, name)
        monkeypatch.setattr(IndexedDataset, name, lambda *values, name=name, original=original: calls.update([name]) or original(*values))
    assert run.stored is not None
    lines = data_notices(config, run.stored, reading_of_run(config, VOCABULARY, datasets, 60), datasets)
    assert bool(lines) == changed
    # Each corpus begins with the documents of all shorter ones.
    assert calls == ({"lengths_digests": 20, "beginnings_digest": 20 * 21 // 2} if changed else {})


def test_documents_of_the_same_lengths_with_other_tokens_are_others(tmp_path: Path) -> None:
    flags = "--seq-length 32 --split 1 --train-iters 40 --data-path"
    run = Run()
    run.leg(f"{flags} {corpus(tmp_path / 'a', 400, lengths=[20] * 400)}", 20)
    (line,) = run.leg(f"{flags} {corpus(tmp_path / 'b', 400, first_token=9000, lengths=[20] * 400)}", 0)
    assert line.startswith(f"{WARNING}(corpus has other documents)") and line.endswith(
        "those of corpus, whose earlier documents are not all there"
    )


def test_shares_that_differ_in_the_last_bit_are_written_with_all_digits(tmp_path: Path) -> None:
    names = [corpus(tmp_path / "a", 100, f"corpus_{number}", 5000 * number) for number in range(4)]
    run = Run()
    for unit in (1, 100):
        weights = " ".join(f"{weight / unit:g} {name}" for weight, name in zip((91, 20, 5, 70), names, strict=True))
        lines = run.leg(f"--seq-length 32 --split 1 --train-iters 40 --data-path {weights}", 5)
    assert lines[0].startswith(f"{WARNING}(corpus_3 has a share of 0.37634408602150538 there and 0.37634408602150532 here): of the ")


def test_corpora_in_another_order_are_another_order(tmp_path: Path) -> None:
    first, second = corpus(tmp_path / "a", 400), corpus(tmp_path / "a", 300, "other", 15000)
    run = Run()
    run.leg(f"--seq-length 32 --split 1 --train-iters 40 --data-path 1 {first} 1 {second}", 15)
    (line,) = run.leg(f"--seq-length 32 --split 1 --train-iters 40 --data-path 1 {second} 1 {first}", 0)
    assert line.startswith(f"{WARNING}(the corpora have another order): of the ")


def test_a_corpus_whose_file_name_is_not_utf8_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    flags = f"--seq-length 32 --train-iters 40 --data-path {corpus(tmp_path / 'a', 400, os.fsdecode(bytes([0xFF])))}"
    run = Run()
    run.leg(flags, 20)
    assert run.leg(flags, 0) == []
    assert run.stored is not None and run.stored.readings[0].splits["train"][0].corpus == r"\udcff"


def test_an_evaluation_says_nothing_of_training_data(tmp_path: Path) -> None:
    run = Run()
    run.leg(f"--seq-length 32 --train-iters 40 --data-path {corpus(tmp_path / 'a', 400)}", 20)
    assert run.leg(f"--seq-length 32 --train-iters 40 --skip-train --data-path {corpus(tmp_path / 'b', 440)}", 0) == []


def test_training_documents_that_become_validation_documents_are_counted(tmp_path: Path) -> None:
    flags = f"--seq-length 32 --train-iters 40 --data-path {corpus(tmp_path / 'a', 400)}"
    run = Run()
    run.leg(f"{flags} --split 90,10,0", 20)
    assert "WARNING: 40 training documents of the checkpoint's run are validation documents now" in run.leg(f"{flags} --split 80,20,0", 0)


def test_documents_of_a_corpus_that_is_named_twice_change_their_split_once(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "a", 400)
    flags = f"--seq-length 32 --train-iters 40 --data-path 1 {prefix} 1 {prefix}"
    run = Run()
    run.leg(f"{flags} --split 80,20,0", 20)
    assert "WARNING: 40 validation documents of the checkpoint's run are training documents now" in run.leg(f"{flags} --split 90,10,0", 0)


def test_training_documents_are_recognized_in_validation_data_of_another_path(tmp_path: Path) -> None:
    first, second = corpus(tmp_path / "a", 40, "first", 15000), corpus(tmp_path / "a", 50, "second")
    flags = f"--seq-length 32 --train-iters 10 --train-data-path {corpus(tmp_path / 'a', 400)} --valid-data-path"
    run = Run()
    run.leg(f"{flags} {first}", 5)
    assert "WARNING: 50 training documents of the checkpoint's run are validation documents now" in run.leg(f"{flags} {second}", 0)


def test_validation_data_of_another_path_are_said_to_be_others(tmp_path: Path) -> None:
    first, second = corpus(tmp_path / "a", 40, "first", 15000), corpus(tmp_path / "a", 50, "second", 15000)
    flags = f"--seq-length 32 --train-iters 10 --train-data-path {corpus(tmp_path / 'a', 400)} --valid-data-path"
    run = Run()
    run.leg(f"{flags} {first}", 5)
    assert run.leg(f"{flags} {second}", 0) == [
        "WARNING: the validation data have changed (first is left out, second is new): losses are not comparable"
    ]


def test_another_tokenizer_of_the_same_corpus_is_named(tmp_path: Path) -> None:
    flags = f"--seq-length 32 --train-iters 10 --split 1 {the_same(tmp_path)}"
    run = Run()
    run.leg(flags, 5)
    assert run.stored is not None
    run.stored.manifest.run["readings"][0]["tokenizer"] = "GPT2BPETokenizer of 50257 ids, of which 50256 ends a document"
    assert run.leg(flags, 0) == [
        "WARNING: the checkpoint's run had another tokenizer: GPT2BPETokenizer of 50257 ids, of which 50256 ends a document there and "
        "NullTokenizer of 30000 ids, of which 29999 ends a document here"
    ]


def test_a_checkpoint_that_does_not_say_what_was_read_goes_on_with_one_line(tmp_path: Path) -> None:
    flags = f"--seq-length 32 --train-iters 10 --split 1 {the_same(tmp_path)}"
    run = Run()
    run.leg(flags, 5)
    assert run.stored is not None
    older = {name: value for name, value in run.stored.manifest.run.items() if name not in ("readings", "consumed_tokens")}
    run.stored = replace(run.stored, manifest=replace(run.stored.manifest, run=older))
    assert run.leg(flags, 2) == ["the checkpoint does not say which data its run has read, so they are not compared with the data here"]
    assert run.leg(flags, 0) == []
    (line,) = run.leg(f"{flags} --seed 5", 0)
    assert line.endswith("; not counted: those before sample 20, about which the checkpoint does not say what they are")


def test_an_order_that_takes_more_memory_than_there_is_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--seq-length 32 --train-iters 10 --split 1 {the_same(tmp_path)}"
    run = Run()
    run.leg(flags, 5)
    stored = run.stored
    run.leg(f"{flags} --seed 5", 0)  # its indices are in the cache then
    monkeypatch.setattr(available_memory, "available_host_bytes", lambda *_: 100)
    run.stored = stored
    (line,) = run.leg(f"{flags} --seed 5", 0)
    assert line.endswith("; not counted: those of corpus, whose earlier order takes more memory than this machine has left")
