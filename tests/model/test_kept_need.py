"""Bytes of kept inputs: the table of model/kept_need.py."""

from __future__ import annotations

from typing import Any

import pytest
from harness.small_gpt import small_config

from megatron_zpp.model.activations import activation_need
from megatron_zpp.model.block_memory import AttentionNeed, RankShare
from megatron_zpp.model.kept_need import NOTHING_KEPT, KeptNeed, kept_inputs_shape, kept_need

FULL: dict[str, Any] = {"num_layers": 6, "recompute_granularity": "full", "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
SAMPLES, RANKS = 3, 4
WHOLE, CHUNKS = SAMPLES * 32 * 64 * 2, 6
PART = WHOLE // RANKS


def need_of(*, has_host: bool = True, sequence_parallel: bool = False, ranks: int = RANKS, **changes: Any) -> KeptNeed:
    config = small_config(**FULL | changes)
    shape = kept_inputs_shape(config, SAMPLES, ranks, sequence_parallel=sequence_parallel)
    return kept_need(config, shape, 2, has_host=has_host)


def test_the_bytes_of_every_flag_are_those_of_the_table() -> None:
    divided = {"partition_activations": True}
    assert need_of() == KeptNeed(passing=CHUNKS * WHOLE)
    assert need_of(**divided) == KeptNeed(passing=CHUNKS * PART, staging=2 * WHOLE)
    assert need_of(contiguous_checkpointing=True) == KeptNeed(lasting=CHUNKS * WHOLE)
    assert need_of(contiguous_checkpointing=True, **divided) == KeptNeed(lasting=CHUNKS * PART, staging=2 * WHOLE)
    for contiguous in (False, True):
        on_host: dict[str, Any] = {"checkpoint_in_cpu": True, "contiguous_checkpointing": contiguous}
        assert need_of(**on_host) == KeptNeed(staging=2 * WHOLE, host=CHUNKS * WHOLE)
        assert need_of(**on_host, **divided) == KeptNeed(staging=2 * WHOLE + 2 * PART, host=CHUNKS * PART)
        assert need_of(has_host=False, **on_host) == need_of(contiguous_checkpointing=True)


def test_one_rank_and_sequence_parallelism_divide_nothing_again() -> None:
    assert need_of(ranks=1, partition_activations=True) == need_of(ranks=1)
    own = need_of(sequence_parallel=True)
    assert own == KeptNeed(passing=CHUNKS * PART) == need_of(sequence_parallel=True, partition_activations=True)


def test_a_rank_keeps_one_input_of_each_chunk_and_without_chunks_nothing() -> None:
    chunks = {"recompute_method": "uniform", "recompute_num_layers": 4}
    assert need_of(contiguous_checkpointing=True, **chunks).lasting == 2 * WHOLE
    assert need_of(contiguous_checkpointing=True, recompute_method="block", recompute_num_layers=1).lasting == WHOLE
    assert need_of(recompute_granularity="selective") == NOTHING_KEPT
    one = {"recompute_method": "uniform", "recompute_num_layers": 6}
    assert need_of(partition_activations=True, **one).staging == WHOLE  # there is no next chunk


def test_parts_are_padded_to_16_bytes() -> None:
    assert need_of(partition_activations=True, hidden_size=3, seq_length=1).passing == CHUNKS * 16


@pytest.mark.parametrize("flag", ["partition_activations", "checkpoint_in_cpu", "contiguous_checkpointing"])
def test_the_estimate_of_activations_has_what_passes_and_staging_instead_of_whole_inputs(flag: str) -> None:
    def estimate(**changes: Any) -> int:
        config = small_config(**FULL | changes)
        attention = AttentionNeed(keeps_scores=False)
        return activation_need(config, 64, RankShare(SAMPLES, 2, RANKS), attention=attention, is_on_gpu=True).in_blocks

    plain, kept = need_of(), need_of(**{flag: True})
    assert estimate(**{flag: True}) - estimate() == kept.passing + kept.staging - plain.passing
