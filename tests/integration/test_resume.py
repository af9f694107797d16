"""A resumed run equals one that never stopped."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from harness.rank_pool import RankPool
from harness.tiny_corpus import write_corpus
from harness.tiny_runs import TINY, entry, losses, pretrain
from test_bad_input import entry_and_output

from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, MARKER_FILE, StoredPiece, marker_json, read_manifest
from megatron_zpp.training.trainer import Trainer

SAVED_AT, END = 3, 5
WARNING = "WARNING: the training data or their order have changed "


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 documents of 5 to 40 tokens: an epoch ends every few steps."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 100, size=generator.integers(5, 40)).tolist() for _ in range(60)]
    return Path(write_corpus(tmp_path, documents))


def flags(corpus: Path, precision: str, stage: int) -> str:
    return (
        f"--data-path {corpus} --split 80,10,10 --tokenizer-type NullTokenizer --train-iters {END} --micro-batch-size 2 "
        f"--global-batch-size 16 --eval-iters 1 --eval-interval 3 --zero-stage {stage} {precision}"
    )


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, ""), (3, "--bf16"), (3, "--fp16 --initial-loss-scale 65536 --loss-scale-window 2")], ids=str
)
def test_resume_equals_not_having_stopped_bit_for_bit(ranks: RankPool, tmp_path: Path, corpus: Path, stage: int, precision: str) -> None:
    common = f"{flags(corpus, precision, stage)} --global-batch-size 8 --split 40,50,10"
    whole = pretrain(ranks, 1, 2, common, tmp_path / "whole.jsonl")
    checkpoints = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    pretrain(ranks, 1, 2, f"{common} {checkpoints} --exit-interval {SAVED_AT}", tmp_path / "parts.jsonl")
    parts = pretrain(ranks, 1, 2, f"{common} {checkpoints}", tmp_path / "parts.jsonl")
    assert len(losses(whole)) == END
    assert [told(record) for record in parts] == [told(record) for record in whole]


def entry_that_counts_pieces(flags: list[str]) -> tuple[int, int]:
    """The exit code, and how many pieces of checkpoints are described in memory when training begins."""
    found, run = [], Trainer.run

    def counted(trainer: Trainer) -> None:
        found.append(sum(isinstance(value, StoredPiece) for value in gc.get_objects()))
        run(trainer)

    with mock.patch.object(Trainer, "run", counted):
        return entry(flags), found[0]


@pytest.mark.parametrize("extra", ["", "--load-last-good-checkpoint --use-checkpoint-args", "--node-local-checkpoints"])
def test_while_a_resumed_run_trains_it_holds_no_manifest(ranks: RankPool, tmp_path: Path, corpus: Path, extra: str) -> None:
    common = f"{flags(corpus, '', 3)} --save {tmp_path} --load {tmp_path}"
    pretrain(ranks, 1, 2, f"{common} --exit-interval {SAVED_AT}", tmp_path / "parts.jsonl")
    assert ranks.run(1, 2, entry_that_counts_pieces, [*TINY, *f"{common} {extra}".split()]) == [(0, 0)] * 2


def test_a_checkpoint_of_one_world_and_stage_goes_on_in_another_within_fp32_rounding(ranks: RankPool, tmp_path: Path, corpus: Path) -> None:
    saving = f"--save {tmp_path / 'saved'} --save-interval {SAVED_AT}"
    whole = pretrain(ranks, 2, 2, f"{flags(corpus, '', 3)} {saving}", tmp_path / "whole.jsonl")
    loading = f"--load {tmp_path / 'saved'} --ckpt-step {SAVED_AT}"
    rest = pretrain(ranks, 1, 2, f"{flags(corpus, '', 0)} {loading}", tmp_path / "rest.jsonl")
    assert [loss for loss, _ in losses(rest)] == pytest.approx([loss for loss, _ in losses(whole)[SAVED_AT:]], rel=1e-6)


def test_a_smaller_batch_goes_on_in_the_order_of_the_checkpoint_and_a_longer_run_says_what_comes_again(
    ranks: RankPool, tmp_path: Path, corpus: Path
) -> None:
    saved, again = tmp_path / "saved", tmp_path / "again"
    pretrain(ranks, 1, 2, f"{flags(corpus, '', 0)} --save {saved} --exit-interval {SAVED_AT}", tmp_path / "whole.jsonl")
    assert read_manifest(saved / f"iter_{SAVED_AT:07d}").run["ordered_samples"] == 16 * END
    lengths = {5: False, 7: False, 16: True}  # 5: shorter than before, 7: as many samples as before, 16: a third epoch
    found = []
    for length, is_longer in lengths.items():
        smaller = f"{flags(corpus, '', 0)} --global-batch-size 8 --train-iters {length} --load {saved} --save {again}"
        log = tmp_path / f"{length}.jsonl"
        ((code, output),) = ranks.run(1, 1, entry_and_output, [*TINY, *smaller.split(), "--log-jsonl", str(log)])
        assert code == 0 and (WARNING in output) == is_longer
        assert not is_longer or "corpus has 80 samples in order there and 152 here): of the 1664 tokens that are read from here" in output
        found.append(losses([json.loads(line) for line in log.read_text().splitlines()])[: END - SAVED_AT])
        assert read_manifest(again / f"iter_{length:07d}").run["ordered_samples"] == (152 if is_longer else 16 * END)
    assert found[0] == found[1]


def test_a_run_with_longer_samples_counts_the_tokens_of_the_shorter_ones_and_keeps_the_words_about_its_data(
    ranks: RankPool, tmp_path: Path, corpus: Path
) -> None:
    common = f"--data-path {corpus} --split 80,10,10 --tokenizer-type NullTokenizer --global-batch-size 4 --eval-iters 1"
    common += f" --max-position-embeddings 32 --train-tokens 1024 --lr-warmup-tokens 768 --save {tmp_path / 'saved'}"
    pretrain(ranks, 1, 1, f"{common} --exit-interval 8", tmp_path / "short.jsonl")
    longer = f"{common} --load {tmp_path / 'saved'} --seq-length 32 --log-jsonl {tmp_path / 'long.jsonl'}"
    ((code, output),) = ranks.run(1, 1, entry_and_output, [*TINY, *longer.split()])
    records = [json.loads(line) for line in (tmp_path / "long.jsonl").read_text().splitlines()]
    steps = [(record["iteration"], record["consumed_tokens"]) for record in records if "consumed_tokens" in record]
    assert code == 0 and steps == [(9, 640), (10, 768), (11, 896), (12, 1024)]
    short = [json.loads(line) for line in (tmp_path / "short.jsonl").read_text().splitlines()]
    rates = [record["learning_rate"] for record in [*short, *records] if "learning_rate" in record]
    assert rates[:11] == pytest.approx([rates[1] * tokens / 64 for tokens in [*range(0, 513, 64), 640, 768]])
    assert f"{WARNING}(corpus has samples of 16 tokens there and 32 here): of the 512 tokens that are read from here on, " in output
    readings = read_manifest(tmp_path / "saved" / "iter_0000012").run["readings"]
    assert [(reading["first_sample"], reading["seq_length"]) for reading in readings] == [(0, 16), (32, 32)]


def test_a_dynamic_loss_scale_does_not_start_from_the_constant_one_of_another_precision(
    ranks: RankPool, tmp_path: Path, corpus: Path
) -> None:
    checkpoints = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    pretrain(ranks, 1, 2, f"{flags(corpus, '--bf16', 3)} {checkpoints} --exit-interval 2", tmp_path / "bf16.jsonl")
    records = pretrain(ranks, 1, 2, f"{flags(corpus, '--fp16 --initial-loss-scale 1024', 3)} {checkpoints}", tmp_path / "fp16.jsonl")
    assert records[0]["iteration"] == 3 and records[0]["loss_scale"] == 1024


def test_a_run_from_before_samples_were_dealt_as_in_megatron_goes_on_with_its_own_order(ranks: RankPool, tmp_path: Path) -> None:
    corpora = [write_corpus(tmp_path, np.random.default_rng(seed).integers(0, 90, (20, 30)).tolist(), name=f"c{seed}") for seed in range(3)]
    # The two rules deal sample 9 and the next ones to different corpora: the first two batches are samples 0 to 7.
    blend = " ".join(f"{weight} {prefix}" for weight, prefix in zip((0.1, 0.6, 0.2), corpora, strict=True))
    common = f"--data-path {blend} --split 1 --tokenizer-type NullTokenizer --train-iters 4 --global-batch-size 4 --eval-iters 0"
    checkpoints = f"--save {tmp_path / 'saved'} --save-interval 2 --load {tmp_path / 'saved'}"
    whole = pretrain(ranks, 1, 1, f"{common} {checkpoints} --blend-normalization once", tmp_path / "whole.jsonl")
    forget_rules(tmp_path / "saved" / "iter_0000002")
    goes_on = [*TINY, *f"{common} {checkpoints} --ckpt-step 2 --log-jsonl {tmp_path / 'parts.jsonl'}".split()]
    ((code, output),) = ranks.run(1, 1, entry_and_output, goes_on)
    parts = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert code == 0 and losses(parts) == losses(whole)[2:]
    assert "samples are dealt to corpora as in the checkpoint's run: --blend-normalization once\n" in output
    given = f"{common} {checkpoints} --ckpt-step 2 --blend-normalization twice"
    assert losses(pretrain(ranks, 1, 1, given, tmp_path / "other.jsonl")) != losses(whole)[2:]


def forget_rules(folder: Path) -> None:
    """Rewrites the manifest of a checkpoint as programs wrote it that had no flag for the rule."""
    manifest = read_manifest(folder)
    del manifest.flags["data"]["blend_normalization"]
    (folder / MANIFEST_FILE).write_text(manifest.to_json())
    (folder / MARKER_FILE).write_text(marker_json(manifest.to_json()))


def test_the_last_iteration_is_logged_also_between_log_intervals(ranks: RankPool, tmp_path: Path) -> None:
    records = pretrain(ranks, 1, 2, "--train-iters 5 --log-interval 2", tmp_path / "run.jsonl")
    assert [record["iteration"] for record in records] == [2, 4, 5]


def told(record: dict[str, float]) -> dict[str, float]:
    """What a record says of the training, without clocks and memory."""
    measured = {"elapsed_ms_per_iteration", "data_ms_per_iteration", "tokens_per_second", "tflops_per_gpu", "max_memory_bytes"}
    measured |= {"model_tflops_per_gpu", "eta_seconds"}
    return {key: value for key, value in record.items() if key not in measured}
