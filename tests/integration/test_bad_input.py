"""A user's mistake ends the run at start-up on every rank: exit code not 0, and one message that says what to do."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch
from harness.rank_pool import RankPool
from harness.tiny_corpus import write_corpus
from harness.tiny_runs import TINY, entry

DATA = "--tokenizer-type NullTokenizer --train-iters 2 --split 100,0,0"


def entry_and_errors(flags_by_rank: list[str]) -> tuple[int, str]:
    """The exit code on this rank and what it wrote to standard error; a rank without flags of its own takes the first."""
    rank = int(os.environ["RANK"])
    flags = flags_by_rank[rank if rank < len(flags_by_rank) else 0]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = entry([*TINY, *flags.split()])
    return code, errors.getvalue()


def message_of(ranks: RankPool, nodes: int, ranks_per_node: int, *flags_by_rank: str) -> str:
    """The one message that a world of ranks, all of which must refuse, prints."""
    results = ranks.run(nodes, ranks_per_node, entry_and_errors, list(flags_by_rank))
    assert all(code != 0 for code, _ in results)
    texts = [text for _, text in results if text]
    assert len(texts) == 1
    assert texts[0].startswith("pretrain_zeropp_gpt.py: error: ")
    return texts[0]


# A mistake that parsing finds, one that the number of ranks makes, one of the vocabulary, one of this machine. Other flags: tests/config.
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--zero-stag 3", ["--zero-stag", "did you mean --zero-stage?"]),
        ("--ranks-per-node 3", ["--ranks-per-node 3", "4", "1, 2"]),
        (
            "--tensor-model-parallel-size 2 --vocab-size 101 --make-vocab-size-divisible-by 1",
            ["the vocabulary of 101 rows", "--tensor-model-parallel-size 2", "give --make-vocab-size-divisible-by 2"],
        ),
        ("--distributed-backend nccl", ["--distributed-backend nccl", "GPU"]),
    ],
    ids=["unknown", "nodes", "vocabulary", "backend"],
)
def test_a_flag_that_cannot_be_is_refused_once_for_all_ranks(ranks: RankPool, flags: str, words: list[str]) -> None:
    if "nccl" in flags:
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        results = ranks.run(2, 2, entry_and_errors, [flags])
        assert all(code != 0 and all(word in text for word in words) for code, text in results)
        return
    message = message_of(ranks, 2, 2, flags)
    assert all(word in message for word in words), message


def test_missing_data_files_are_named(ranks: RankPool, tmp_path: Path) -> None:
    message = message_of(ranks, 1, 2, f"--data-path {tmp_path / 'nothing'} {DATA}")
    assert str(tmp_path / "nothing") in message and "on rank" not in message


def test_data_files_missing_on_one_node_are_named_with_its_ranks(ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[1] * 200])
    elsewhere = f"--data-path {tmp_path / 'elsewhere'} {DATA}"
    message = message_of(ranks, 2, 1, f"--data-path {prefix} {DATA}", elsewhere)
    assert str(tmp_path / "elsewhere") in message and "(on rank 1 of 2)" in message


def test_a_node_with_another_corpus_is_refused_and_both_are_named(ranks: RankPool, tmp_path: Path) -> None:
    one = write_corpus(tmp_path, [[1] * 200])
    other = write_corpus(tmp_path, [[1] * 200, [2] * 50], name="other")
    message = message_of(ranks, 2, 1, *(f"--data-path {prefix} {DATA}" for prefix in (one, other)))
    assert f"{one} with 1 document and 200 tokens on rank 0, and {other} with 2 documents and 250 tokens on rank 1" in message


def test_a_truncated_bin_file_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[1] * 200])
    os.truncate(f"{prefix}.bin", 300)
    message = message_of(ranks, 1, 2, f"--data-path {prefix} {DATA}")
    assert f"{prefix}.bin" in message and "300" in message and "400" in message


def test_an_idx_file_with_a_wrong_magic_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[1] * 200])
    with open(f"{prefix}.idx", "r+b") as index:
        index.write(b"SOMETHING")
    message = message_of(ranks, 1, 2, f"--data-path {prefix} {DATA}")
    assert f"{prefix}.idx" in message and "SOMETHING" in message


def test_a_token_id_beyond_the_vocabulary_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[1] * 200 + [100]])
    message = message_of(ranks, 1, 2, f"--data-path {prefix} {DATA}")
    assert f"{prefix}.bin" in message and "100" in message and "--vocab-size" in message


def test_a_checkpoint_of_another_model_is_refused_with_the_flags_that_differ(ranks: RankPool, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert ranks.run(1, 2, entry, [*TINY, "--train-iters", "1", "--save", str(saved)]) == [0, 0]
    message = message_of(ranks, 1, 2, f"--train-iters 2 --load {saved} --num-layers 3")
    assert "--num-layers 2 there and 3 here" in message


def test_a_checkpoint_of_the_same_shapes_and_other_heads_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert ranks.run(1, 2, entry, [*TINY, "--train-iters", "1", "--save", str(saved)]) == [0, 0]
    message = message_of(ranks, 1, 2, f"--train-iters 2 --load {saved} --num-attention-heads 2")
    assert "--num-attention-heads 4 there and 2 here" in message


def test_ranks_started_with_different_flags_are_refused(ranks: RankPool) -> None:
    message = message_of(ranks, 1, 2, "--train-iters 1 --lr 1e-3", "--train-iters 1 --lr 1e-2")
    assert "--lr 0.001 on rank 0 and 0.01 on rank 1" in message


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(ranks: RankPool, tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("in the way")
    message = message_of(ranks, 1, 2, f"--train-iters 1 {flag} {tmp_path / 'file' / 'folder'}")
    assert f"{flag} {tmp_path / 'file' / 'folder'}" in message


def test_a_folder_named_as_the_file_of_the_latest_iteration_is_refused_before_training(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    message = message_of(ranks, 1, 2, f"--train-iters 1 --save {tmp_path}")
    assert f"--save {tmp_path}: latest_checkpointed_iteration.txt is a folder" in message


def test_what_was_loaded_and_what_differs_is_said(ranks: RankPool, tmp_path: Path) -> None:
    flags = [*TINY, "--load", str(tmp_path), "--save", str(tmp_path)]
    first = ranks.run(1, 2, entry_and_output, [*flags, "--train-iters", "1"])
    second = ranks.run(1, 2, entry_and_output, [*flags, "--train-iters", "1", "--seed", "7"])
    assert "holds no checkpoint; starting from scratch" in first[0][1]
    assert f"successfully loaded checkpoint from {tmp_path / 'iter_0000001'} at iteration 1" in second[0][1]
    assert "--seed 1234 there and 7 here" in second[0][1]
    assert "--train-iters 1 is reached; give a higher number to go on, or --skip-train to evaluate" in second[0][1]
    assert "saving checkpoint" not in second[0][1]


def test_a_missing_checkpoint_is_refused_when_asked_to(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    message = message_of(ranks, 1, 2, f"--train-iters 2 --load {tmp_path} --exit-on-missing-checkpoint")
    assert f"--load {tmp_path} has no latest_checkpointed_iteration.txt, only iterations 3 (--ckpt-step" in message


def test_a_corpus_too_small_for_validation_is_said_and_trained_on(ranks: RankPool, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[1] * 40] * 15)
    flags = f"--data-path {prefix} --tokenizer-type NullTokenizer --train-iters 2 --eval-iters 1 --eval-interval 1"
    results = ranks.run(1, 2, entry_and_output, [*TINY, *flags.split()])
    assert [code for code, _ in results] == [0, 0]
    assert "The validation split of" in results[0][1] and "The test split of" in results[0][1]


def entry_and_output(flags: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = entry(flags)
    return code, output.getvalue()
