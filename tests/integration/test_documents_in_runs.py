"""Whole runs on packed documents: the flags change the losses, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from harness.rank_pool import RankPool
from harness.tiny_corpus import write_corpus
from harness.tiny_runs import losses, pretrain

DATA = "--tokenizer-type NullTokenizer --train-iters 3 --split 1 --micro-batch-size 2"
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"


def blend_of_short_documents(folder: Path) -> str:
    generator = np.random.RandomState(4)
    prefixes = []
    for number in range(2):
        documents = [[*generator.randint(0, 99, generator.randint(0, 12)).tolist(), 99] for _ in range(60)]
        prefixes.append(write_corpus(folder, documents, name=f"c{number}"))
    return f"--data-path 0.3 {prefixes[0]} 0.7 {prefixes[1]} --data-cache-path {folder / 'cache'} {DATA}"


def test_documents_change_the_losses_alike_with_recomputation_and_in_every_stage(ranks: RankPool, tmp_path: Path) -> None:
    data = blend_of_short_documents(tmp_path)
    plain = losses(pretrain(ranks, 1, 2, data, tmp_path / "plain.jsonl"))
    packed = pretrain(ranks, 1, 2, f"{data} {DOCUMENTS} --log-samples-per-source", tmp_path / "packed.jsonl")
    # Bit for bit: at one world shape with one micro-batch per step, neither stages nor recomputation change a number.
    others = f"{data} {DOCUMENTS} --checkpoint-activations --zero-stage 3"
    assert losses(pretrain(ranks, 1, 2, others, tmp_path / "others.jsonl")) == losses(packed) != plain
    counts = [sorted(record["consumed_samples_per_source"].values()) for record in packed]
    assert counts == [[1, 3], [3, 5], [4, 8]]  # of 4, 8 and 12 samples, whoever is furthest behind 0.3 and 0.7


def test_one_rank_meets_the_samples_of_two(ranks: RankPool, tmp_path: Path) -> None:
    data = f"{blend_of_short_documents(tmp_path)} {DOCUMENTS} --global-batch-size 4 --zero-stage 1"
    alone, together = (losses(pretrain(ranks, 1, count, data, tmp_path / f"{count}.jsonl")) for count in (1, 2))
    # fp32 sums in another order: 24 bits, some hundred terms, weights of a few steps behind them.
    np.testing.assert_allclose(alone, together, rtol=2e-5)


def test_ranks_started_with_other_weights_of_a_blend_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    from test_bad_input import message_of

    data = blend_of_short_documents(tmp_path)
    assert "(0.3, 0.7)" in message_of(ranks, 1, 2, data, data.replace("0.3", "0.5"))
