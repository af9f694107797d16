from __future__ import annotations

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.ranks import RankCounts, count_ranks


def test_tensor_ranks_share_samples_so_that_the_others_are_data_ranks() -> None:
    ranks = RankCounts(world=24, tensor=4, ranks_per_node=8)
    assert (ranks.data, ranks.data_ranks_per_node) == (6, 2)


def test_every_rank_is_a_data_rank_unless_ranks_share_layers() -> None:
    ranks = count_ranks(parse_flags([]), 12, 4)
    assert ranks == RankCounts(world=12, tensor=1, ranks_per_node=4)
    assert (ranks.data, ranks.data_ranks_per_node) == (12, 4)


@pytest.mark.parametrize("flags, world_size, local, ranks_per_node", [("--ranks-per-node 2", 8, 4, 2), ("", 8, 4, 4), ("", 1, None, 1)])
def test_the_flag_decides_before_the_launcher_and_one_rank_needs_neither(
    flags: str, world_size: int, local: int | None, ranks_per_node: int
) -> None:
    assert count_ranks(parse_flags(flags.split()), world_size, local).ranks_per_node == ranks_per_node


def test_a_world_whose_nodes_nobody_names_is_refused_with_the_remedy() -> None:
    with pytest.raises(FlagError, match="launcher of these 4 ranks does not say it in LOCAL_WORLD_SIZE.*give --ranks-per-node"):
        count_ranks(parse_flags([]), 4, None)


def test_ranks_that_share_layers_stand_on_one_node_whatever_says_how_many_it_has() -> None:
    ranks = count_ranks(parse_flags("--tensor-model-parallel-size 2".split()), 8, 4)
    assert (ranks.data, ranks.data_ranks_per_node, ranks.groups_in_words) == (4, 2, "4 data-parallel ranks")
    words = [
        "--tensor-model-parallel-size 4 does not divide the 6 ranks of a node (--ranks-per-node 6",
        "), and the ranks that share a layer stand on one node; choose 1, 2, 3 or 6, or start a multiple of 4 ranks per node.",
    ]
    for flags, local, source in (("", 6, ", from the launcher"), ("--ranks-per-node 6", None, "")):
        with pytest.raises(FlagError) as found:
            count_ranks(parse_flags(f"--tensor-model-parallel-size 4 {flags}".split()), 12, local)
        assert str(found.value) == source.join(words)


@pytest.mark.parametrize(
    ("flags", "groups", "words"),
    [
        ("--context-parallel-size 2", 4, "4 sample groups of 2 ranks"),
        ("--context-parallel-size 8", 1, "1 sample group of 8 ranks"),
        ("--context-parallel-size 2 --tensor-model-parallel-size 2", 2, "2 sample groups of 2 data-parallel ranks"),
    ],
)
def test_data_ranks_that_divide_a_sample_are_one_group(flags: str, groups: int, words: str) -> None:
    ranks = count_ranks(parse_flags(flags.split()), 8, 4)
    assert (ranks.data, ranks.sample_groups, ranks.groups_in_words) == (8 // ranks.tensor, groups, words)


@pytest.mark.parametrize(
    ("flags", "world", "words"),
    [
        ("--context-parallel-size 3", 8, "--context-parallel-size 3 does not divide the 8 ranks of the world; choose 1, 2, 4 or 8."),
        (
            "--context-parallel-size 8 --tensor-model-parallel-size 2",
            8,
            "--context-parallel-size 8 does not divide the 4 data-parallel ranks of the world (--tensor-model-parallel-size 2 of 8 ranks); "
            "choose 1, 2 or 4.",
        ),
        (
            "--context-parallel-size 4 --ranks-per-node 6",
            12,
            "--context-parallel-size 4 does not fit the 6 ranks of a node, as a node must have whole groups, or a group whole nodes; "
            "choose 1, 2, 3 or 6.",
        ),
        ("--context-parallel-size 2", 1, "--context-parallel-size 2 does not divide the 1 rank of the world; choose 1."),
    ],
)
def test_groups_that_do_not_fit_the_world_are_refused_with_those_that_do(flags: str, world: int, words: str) -> None:
    with pytest.raises(FlagError) as found:
        count_ranks(parse_flags(flags.split()), world, min(4, world))
    assert str(found.value) == words


def test_nodes_of_one_rank_and_a_run_without_a_launcher_are_told_to_start_more() -> None:
    with pytest.raises(FlagError, match="divide the 1 rank of a node .* choose 1, or start a multiple of 2 ranks per node"):
        count_ranks(parse_flags("--tensor-model-parallel-size 2".split()), 4, 1)
    with pytest.raises(
        FlagError, match="this run has one rank; choose 1, or start a multiple of 2 ranks per node.*torchrun --nproc_per_node 2"
    ):
        count_ranks(parse_flags("--tensor-model-parallel-size 2".split()), 1, None)
