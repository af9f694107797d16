"""Samples that ranks cannot divide are refused with flag, value, rule and remedy."""

from __future__ import annotations

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config

GPT2 = "--num-layers 1 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"


def run_of(flags: str, world_size: int = 8, ranks_per_node: int = 8) -> Config:
    return resolve(parse_flags(f"{GPT2} {flags}".split()), world_size, ranks_per_node)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--context-parallel-size 8",
            "--num-attention-heads 12 is not a multiple of --context-parallel-size 8; choose --context-parallel-size 1, 2 or 4.",
        ),
        (
            "--context-parallel-size 4 --tensor-model-parallel-size 2",
            "--num-attention-heads 12 is not a multiple of 8 (--tensor-model-parallel-size 2 x --context-parallel-size 4); choose "
            "--context-parallel-size 1 or 2.",
        ),
        (
            "--context-parallel-size 4 --num-query-groups 6",
            "--num-query-groups 6 and --context-parallel-size 4: one must divide the other, so that key heads are dealt to ranks or ranks "
            "to key heads; choose --context-parallel-size 1 or 2.",
        ),
        (
            "--context-parallel-size 4 --seq-length 1002",
            "--seq-length 1002 is not a multiple of --context-parallel-size 4, by which tokens are divided; choose 1004.",
        ),
        (
            "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 1004 --num-attention-heads 16",
            "--seq-length 1004 is not a multiple of 8 (--context-parallel-size 2 x --tensor-model-parallel-size 4, with "
            "--sequence-parallel), by which tokens are divided; choose 1008.",
        ),
        (
            "--context-parallel-size 2 --cp-comm-type p2p",
            "--cp-comm-type p2p is not available, because keys and values do not go around a ring; choose --cp-comm-type a2a, which "
            "exchanges tokens for heads, or leave it out.",
        ),
        (
            "--context-parallel-size 2 --compile",
            "--compile is not available with --context-parallel-size 2, because blocks wait for other ranks; leave --compile out, or "
            "choose --context-parallel-size 1.",
        ),
    ],
)
def test_a_sample_that_cannot_be_divided_is_refused_in_one_sentence(flags: str, words: str) -> None:
    with pytest.raises(FlagError) as found:
        run_of(flags)
    assert str(found.value) == words


@pytest.mark.parametrize("kind", ["p2p", "allgather", "a2a+p2p"])
def test_every_other_exchange_is_refused_where_samples_are_divided_and_means_nothing_where_they_are_not(kind: str) -> None:
    with pytest.raises(FlagError, match="choose --cp-comm-type a2a"):
        run_of(f"--context-parallel-size 2 --cp-comm-type {kind}")
    notices = run_of(f"--cp-comm-type {kind}").notices
    assert "--cp-comm-type has no effect with --context-parallel-size 1" in notices


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16])
def test_key_heads_may_be_more_or_fewer_than_the_ranks_to_which_they_are_dealt(groups: int) -> None:
    config = run_of(f"--num-attention-heads 16 --num-query-groups {groups} --context-parallel-size 4 --tensor-model-parallel-size 2")
    assert config.model.key_value_heads == groups


def test_the_flags_of_both_megatrons_are_one() -> None:
    sizes = [run_of(f"--{flag} 4").distributed.context_parallel_size for flag in ("context-parallel-size", "ds-sequence-parallel-size")]
    assert sizes == [4, 4]
    with pytest.raises(FlagError, match="--context-parallel-size 2 and --ds-sequence-parallel-size 4 are two values for one setting"):
        run_of("--context-parallel-size 2 --ds-sequence-parallel-size 4")


def test_a_sample_on_several_nodes_is_allowed_with_one_line_about_its_cost() -> None:
    (line,) = run_of("--context-parallel-size 4", 8, 2).notices[-1:]
    assert line.startswith("--context-parallel-size 4: the ranks of a sample are on 2 nodes, so of what attention exchanges 2 of 4 parts")
    assert line.endswith("a size of 2 or less stays inside a node")
    assert not any("parts cross between nodes" in line for line in run_of("--context-parallel-size 4", 8, 4).notices)


@pytest.mark.parametrize("recomputed, crosses_again", [("selective", False), ("full --recompute-method uniform", True)])
def test_only_blocks_that_are_recomputed_as_a_whole_exchange_again(recomputed: str, crosses_again: bool) -> None:
    line = run_of(f"--context-parallel-size 4 --recompute-granularity {recomputed}", 8, 2).notices[-1]
    assert ("and again in blocks that backward recomputes" in line) == crosses_again


def test_a_batch_counts_sample_groups() -> None:
    assert run_of("--context-parallel-size 4 --micro-batch-size 3").training.global_batch_size == 6
    with pytest.raises(FlagError) as found:
        run_of("--context-parallel-size 2 --micro-batch-size 2 --global-batch-size 12")
    assert str(found.value) == (
        "--global-batch-size 12 is not a multiple of 8 (--micro-batch-size 2 x 4 sample groups of 2 ranks); "
        "give --decrease-batch-size-if-needed to round down, or choose 8 or 16, or --micro-batch-size 1."
    )
    with pytest.raises(FlagError, match="--eval-global-batch-size 6 is not a multiple of 4 .*4 sample groups of 2 ranks"):
        run_of("--context-parallel-size 2 --eval-global-batch-size 6")
    with pytest.raises(FlagError, match="has batches of 6 samples, not a multiple of 4"):
        run_of("--context-parallel-size 2 --global-batch-size 16 --rampup-batch-size 6 2 100")
