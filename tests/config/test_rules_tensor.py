"""Sizes of the model that tensor ranks cannot share are refused with flag, value, rule and remedy."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.rules_tensor import check_tensor_ranks
from megatron_zpp.config.schema import Config, ModelConfig

GPT2 = "--num-layers 1 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"


def model_of(flags: str) -> ModelConfig:
    return resolve(parse_flags(f"{GPT2} {flags}".split()), 1, None).model


@pytest.mark.parametrize(
    ("flags", "rows", "ranks", "words"),
    [
        (
            "",
            50304,
            8,
            "--num-attention-heads 12 is not a multiple of --tensor-model-parallel-size 8; choose --tensor-model-parallel-size 1, 2 or 4.",
        ),
        (
            "--ffn-hidden-size 1002",
            50304,
            4,
            "--ffn-hidden-size 1002 is not a multiple of --tensor-model-parallel-size 4; choose --tensor-model-parallel-size 1 or 2.",
        ),
        (
            "--num-query-groups 4",
            50304,
            6,
            "--num-query-groups 4 and --tensor-model-parallel-size 6: one must divide the other, so that groups are dealt to ranks or "
            "ranks to groups; choose --tensor-model-parallel-size 1, 2 or 4.",
        ),
        (
            "--num-attention-heads 10 --kv-channels 64 --ffn-hidden-size 1000",
            50304,
            5,
            "the vocabulary of 50304 rows (padded to a multiple of --make-vocab-size-divisible-by 128) is not a multiple of "
            "--tensor-model-parallel-size 5; give --make-vocab-size-divisible-by 640 or --padded-vocab-size 50560, or, for a "
            "checkpoint of 50304 rows, --tensor-model-parallel-size 1.",
        ),
        (
            "--padded-vocab-size 50257 --make-vocab-size-divisible-by 1",
            50257,
            4,
            "the vocabulary of 50257 rows (--padded-vocab-size) is not a multiple of --tensor-model-parallel-size 4; "
            "give --padded-vocab-size 50260, or, for a checkpoint of 50257 rows, --tensor-model-parallel-size 1.",
        ),
        (
            "--padded-vocab-size 50258 --make-vocab-size-divisible-by 1",
            50258,
            4,
            "the vocabulary of 50258 rows (--padded-vocab-size) is not a multiple of --tensor-model-parallel-size 4; "
            "give --padded-vocab-size 50260, or, for a checkpoint of 50258 rows, --tensor-model-parallel-size 2.",
        ),
        (
            "--max-position-embeddings 1025",
            50304,
            4,
            "--max-position-embeddings 1025 is not a multiple of --tensor-model-parallel-size 4; choose 1028.",
        ),
    ],
)
def test_a_size_that_the_ranks_cannot_share_is_refused_with_flag_value_rule_and_remedy(
    flags: str, rows: int, ranks: int, words: str
) -> None:
    with pytest.raises(FlagError) as found:
        check_tensor_ranks(model_of(flags), rows, ranks)
    assert str(found.value) == words


@pytest.mark.parametrize("flags", ["", "--num-query-groups 4", "--position-embedding-type rope", "--ffn-hidden-size 1002"])
def test_the_sizes_that_an_error_names_are_accepted(flags: str) -> None:
    with pytest.raises(FlagError) as found:
        check_tensor_ranks(model_of(flags), 50304, 5)
    choices = str(found.value).split("choose --tensor-model-parallel-size ")[1].rstrip(".").replace(" or ", ", ").split(", ")
    for size in map(int, choices):
        check_tensor_ranks(model_of(flags), 50304 * size, size)


def test_rotary_positions_are_not_divided() -> None:
    check_tensor_ranks(model_of("--position-embedding-type rope --max-position-embeddings 1025"), 50304, 4)


# ---- rules of a run

RUN = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --mock-data --train-iters 4 --lr 1e-3"
SHARED = "--tensor-model-parallel-size"


def resolved(flags: str, world: tuple[int, int] = (8, 4)) -> Config:
    return resolve(parse_flags(f"{RUN} {flags}".split()), *world)


@pytest.mark.parametrize(
    ("flags", "world", "words"),
    [
        (f"{SHARED} 4 --num-attention-heads 6 --kv-channels 8", (8, 4), "--num-attention-heads 6 is not a multiple of"),
        (f"{SHARED} 4 --ffn-hidden-size 90", (8, 4), "--ffn-hidden-size 90 is not a multiple of"),
        (
            f"{SHARED} 6 --num-attention-heads 12 --kv-channels 8 --num-query-groups 4 --ffn-hidden-size 96",
            (6, 6),
            "--num-query-groups 4 and",
        ),
        (f"{SHARED} 4 --max-position-embeddings 34", (8, 4), "--max-position-embeddings 34 is not a multiple of"),
        (
            f"{SHARED} 4 --sequence-parallel --seq-length 30 --position-embedding-type rope",
            (8, 4),
            "--seq-length 30 is not a multiple of --tensor-model-parallel-size 4, among which --sequence-parallel divides tokens; choose "
            "32, or leave --sequence-parallel out.",
        ),
        (
            f"{SHARED} 2 --compile",
            (8, 4),
            "--compile is not available with --tensor-model-parallel-size 2, because blocks wait for other ranks; leave --compile out, or "
            "choose --tensor-model-parallel-size 1.",
        ),
        (
            f"{SHARED} 2 --zero-stage 3 --zero-hpz-partition-size 8",
            (16, 8),
            "--zero-hpz-partition-size 8 does not divide the 4 ranks of a node with the same part of a layer (8 ranks, "
            "--tensor-model-parallel-size 2); choose 2 or 4, or 1 for no copy.",
        ),
        (
            f"{SHARED} 4 --zero-stage 3 --zero-hpz-partition-size 2",
            (8, 4),
            "--zero-hpz-partition-size 2 does not divide the 1 rank of a node with the same part of a layer (4 ranks, "
            "--tensor-model-parallel-size 4); choose 1 for no copy.",
        ),
        (
            f"{SHARED} 4 --zeropp lean",
            (8, 4),
            "--zero-quantized-weight-differences in --zero-stage 3 keeps a copy of the weights divided among the ranks of a node, and with "
            "--tensor-model-parallel-size 4 each node has one rank with samples of its own; choose --zero-stage 2, which keeps all weights "
            "on every rank (",
        ),
        (
            f"{SHARED} 2 --global-batch-size 6",
            (8, 4),
            "--global-batch-size 6 is not a multiple of 4 (--micro-batch-size 1 x 4 data-parallel ranks); give "
            "--decrease-batch-size-if-needed to round down, or choose 4 or 8.",
        ),
        ("--model-parallel-size 2", (8, 4), "--model-parallel-size is not accepted; use --tensor-model-parallel-size."),
    ],
)
def test_a_broken_rule_of_shared_layers_names_flag_value_and_remedy(flags: str, world: tuple[int, int], words: str) -> None:
    with pytest.raises(FlagError) as found:
        resolved(flags, world)
    assert str(found.value).startswith(words)


@pytest.mark.parametrize("world", [(4, 4), (8, 4), (8, 8), (12, 4)])
def test_a_global_batch_has_one_micro_batch_of_each_data_rank(world: tuple[int, int]) -> None:
    assert resolved(f"{SHARED} 4 --micro-batch-size 3", world).training.global_batch_size == 3 * world[0] // 4


def test_sequence_parallelism_without_ranks_that_share_layers_is_switched_off_with_a_notice() -> None:
    config = resolved("--sequence-parallel")
    assert not config.distributed.sequence_parallel
    assert config.notices == ("--sequence-parallel has no effect with --tensor-model-parallel-size 1",)
    assert resolved(f"--sequence-parallel {SHARED} 2").distributed.sequence_parallel


@pytest.mark.parametrize("preset", ["--zeropp paper", "--zeropp lean"])
def test_a_preset_divides_its_copy_among_the_ranks_of_a_node_that_hold_the_same_part(preset: str) -> None:
    assert resolved(f"{SHARED} 2 {preset}", (16, 8)).zero.zero_hpz_partition_size == 4


def test_where_a_node_is_one_group_only_the_link_between_nodes_carries_quantized_values_and_a_notice_says_so() -> None:
    assert resolved(f"{SHARED} 4 --zero-stage 3 --zero-quantized-weights").notices == (
        "--zero-quantized-weights: with --tensor-model-parallel-size 4 each node has one rank with samples of its own, so only the link "
        "between nodes carries quantized values",
    )
    assert resolved(f"{SHARED} 2 --zero-stage 3 --zero-quantized-weights").notices == ()


def test_where_the_world_is_one_group_nothing_is_sharded_and_no_copy_is_kept() -> None:
    config = resolved(f"{SHARED} 4 --zero-stage 3 --zero-quantized-gradients", (4, 4))
    assert config.zero.zero_hpz_partition_size == 1
    assert config.notices == (
        "--zero-quantized-gradients: all 4 ranks have the same samples (--tensor-model-parallel-size), so nothing crosses a link, is "
        "quantized or kept as a copy",
    )


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        ("--zero-stage 3", "weights and gradients"),
        ("--zero-stage 2", "gradients"),
        ("--zero-stage 1", ""),
        ("--zeropp paper", "weights and gradients"),
        ("--zeropp lean", ""),
    ],
)
def test_a_notice_says_that_there_are_more_micro_batches_where_each_sends_something_between_nodes(flags: str, sent: str) -> None:
    notices = [line for line in resolved(f"{flags} {SHARED} 2 --global-batch-size 64").notices if "micro-batches" in line]
    stage = 2 if "stage 2" in flags else 3
    assert notices == [
        f"--tensor-model-parallel-size 2: a global batch of 64 is 16 micro-batches of a rank instead of 8, and --zero-stage {stage} sends "
        f"{sent} between nodes for each; raise --micro-batch-size if memory allows"
        for sent in [sent]
        if sent
    ]


@pytest.mark.parametrize("flags", ["", "--global-batch-size 4", "--global-batch-size 64 --ranks-per-node 8"])
def test_nothing_is_said_where_a_rank_has_one_micro_batch_or_there_is_one_node(flags: str) -> None:
    assert resolved(f"--zero-stage 3 {SHARED} 2 {flags}").notices == ()


def test_ranks_that_share_samples_need_fewer_processes_that_read_them() -> None:
    (notice,) = resolved(f"{SHARED} 4 --num-workers 2").notices
    assert "all 4 ranks that share layers read the same samples, with --num-workers 2 processes each, 8 on a node; fewer may do" in notice
    assert resolved(f"{SHARED} 4 --num-workers 1").notices == resolved("--num-workers 2").notices == ()


REMEDY = re.compile(
    r"[;,] (?:or )?(?:choose|give) (?:(--[a-z-]+) )?([0-9, or]*[0-9])(?: and another (--[a-z-]+))?(?: with (--[a-z-]+) ([0-9]+))?"
)
PADDING = "--make-vocab-size-divisible-by"
MORE = re.compile(r"start a multiple of \d+ ranks per node")


@given(
    heads=st.sampled_from([4, 6, 12, 15, 16]),
    groups=st.sampled_from([1, 2, 3, 4]),
    feed_forward=st.sampled_from([60, 64, 90, 96]),
    length=st.integers(20, 40),
    positions=st.none() | st.integers(40, 48),
    tensor_ranks=st.sampled_from([1, 2, 3, 4, 5, 6]),
    context_ranks=st.sampled_from([1, 2, 3, 4, 5]),
    batch=st.none() | st.sampled_from([1, 2, 3, 6, 24]),
    per_node=st.sampled_from([1, 4, 6, 12, 24]),
    padding=st.sampled_from(["", *(f"{PADDING} {multiple}" for multiple in (1, 12)), *(f"--padded-vocab-size {n}" for n in (130, 132))]),
    others=st.sampled_from(["", "--sequence-parallel", "--compile", "--zeropp lean", "--zero-stage 3 --zero-hpz-partition-size 2"]),
)
@example(12, 3, 90, 24, None, 3, 1, None, 3, "", "")  # the vocabulary
@example(16, 4, 64, 37, 38, 2, 2, None, 4, "", "")  # --seq-length
@example(4, 1, 64, 24, None, 6, 1, None, 6, f"{PADDING} 1", "")  # a wider padding
@example(12, 3, 96, 24, None, 4, 1, None, 6, f"{PADDING} 1", "")  # a wider padding, or more ranks
def test_whatever_number_of_ranks_a_remedy_proposes_breaks_no_other_rule_and_another_value_none_about_its_flag(
    heads: int,
    groups: int,
    feed_forward: int,
    length: int,
    positions: int | None,
    tensor_ranks: int,
    context_ranks: int,
    batch: int | None,
    per_node: int,
    padding: str,
    others: str,
) -> None:
    flags = {
        "--num-attention-heads": heads,
        "--kv-channels": 4,
        "--num-query-groups": groups if heads % groups == 0 else 1,
        "--ffn-hidden-size": feed_forward,
        "--seq-length": length,
        SHARED: tensor_ranks,
        "--context-parallel-size": context_ranks,
        **({} if positions is None else {"--max-position-embeddings": positions}),
        **({} if batch is None else {"--global-batch-size": batch}),
    }

    def error_with(changed: dict[str, object], ranks_per_node: int = per_node) -> str:
        words = [f"{flag} {value}" for flag, value in {**flags, **changed}.items()]
        try:
            config = resolved(f"{padding} {' '.join(words)} {others}", (2 * ranks_per_node, ranks_per_node))
            rows = config.model.padded_vocab_size or 10 * config.model.make_vocab_size_divisible_by
            check_tensor_ranks(config.model, rows, config.distributed.tensor_model_parallel_size)
        except FlagError as error:
            return str(error)
        return ""

    error = error_with({})
    found = REMEDY.search(error)
    if found is None or not error.startswith(
        ("--num-attention", "--num-query", "--ffn", "--seq", "the vocabulary", "--max-position", "--t", "--c")
    ):
        return
    flag = found[1] or error.split()[0]
    beside = {} if found[4] is None else {found[4]: found[5]}
    for value in re.findall(r"[0-9]+", found[2]):
        again = error_with({flag: value, **beside})
        if flag not in (SHARED, "--context-parallel-size"):
            # before its remedy, an error names the flag that it is about, with its value
            assert f"{flag} {value}" not in again.split(";")[0], (error, again)
        elif found[3] is None:  # the tokenizer, whose size is known later, may still not fit the tensor ranks that are given
            assert again == "" or (flag != SHARED and again.startswith("the vocabulary")), (error, again)
        else:
            assert found[3] in again.split()[:2], (error, again)
    if MORE.search(error) and found[3] is None:
        assert error_with(beside, math.lcm(per_node, tensor_ranks)) == "", error


def test_a_size_that_fits_the_nodes_is_not_proposed_where_heads_batch_or_vocabulary_forbid_it() -> None:
    for flags, words in (
        (f"{SHARED} 5", "choose 1 or 2."),  # 6 does not divide the heads, nor 5
        (f"{SHARED} 4", "choose 1 or 2, or start a multiple of 4 ranks per node."),
        (f"{SHARED} 4 --padded-vocab-size 102 --make-vocab-size-divisible-by 2", "choose 1 or 2."),
        (f"{SHARED} 4 --global-batch-size 6", "choose 2, or start a multiple of 4 ranks per node."),  # 1 has 12 groups
        (
            f"{SHARED} 4 --global-batch-size 5",
            "choose 1 or 2 and another --global-batch-size, or start a multiple of 4 ranks per node.",
        ),
        ("--context-parallel-size 4", "choose 1 or 2."),  # 3 does not divide the heads
    ):
        with pytest.raises(FlagError) as found:
            resolved(flags, (12, 6))
        assert str(found.value).endswith(words), str(found.value)


def test_the_size_that_a_file_sets_is_named_with_the_file_and_others_are_tried_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"sequence_parallel_size": 4}')
    with pytest.raises(FlagError, match="choose 1 or 2 .--context-parallel-size is sequence_parallel_size 4 in .*ds.json"):
        resolved(f"--deepspeed_config {tmp_path / 'ds.json'}", (12, 6))


def test_a_vocabulary_without_padding_is_padded_for_the_ranks_that_a_remedy_proposes() -> None:
    for flags, words in (
        (f"{SHARED} 16", "choose --tensor-model-parallel-size 1, 2, 4 or 8 with --make-vocab-size-divisible-by 8."),
        (f"{SHARED} 32", "choose 1, 2, 4 or 8 with --make-vocab-size-divisible-by 8."),
        (
            f"{SHARED} 8 --ranks-per-node 4",
            "choose 1, 2 or 4 with --make-vocab-size-divisible-by 8, or start a multiple of 8 ranks per node.",
        ),
        (f"{SHARED} 16 --padded-vocab-size 101", "choose --tensor-model-parallel-size 1."),  # of a checkpoint
    ):
        with pytest.raises(FlagError) as found:
            resolved(f"{flags} {PADDING} 1", (16, 16))
        assert str(found.value).endswith(words), str(found.value)
