"""Where inputs of recomputed chunks are kept: spellings of flags, keys of a DeepSpeed JSON, what has no effect, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config

RUN = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --train-iters 4 --lr 1e-3"
FULL = "--checkpoint-activations"
SPELLINGS = {
    "partition_activations": ["--partition-activations", "--distribute-saved-activations", "--distribute-checkpointed-activations"],
    "checkpoint_in_cpu": ["--checkpoint-in-cpu", "--cpu-checkpointing"],
    "contiguous_checkpointing": ["--contiguous-checkpointing", "--contigious-checkpointing"],
}
KEYS = {
    "partition_activations": "partition_activations",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "contiguous_memory_optimization": "contiguous_checkpointing",
}


def resolved(flags: str) -> Config:
    return resolve(parse_flags(f"{RUN} {flags}".split()), 4, 4)


def with_json(folder: Path, block: dict[str, Any], flags: str = FULL) -> Config:
    file = folder / "ds.json"
    file.write_text(json.dumps({"activation_checkpointing": block}))
    return resolved(f"--deepspeed_config {file} {flags}")


def notices_about(config: Config, flag: str) -> list[str]:
    return [notice for notice in config.notices if notice.startswith(flag)]


@pytest.mark.parametrize(("field", "spelling"), [(field, spelling) for field, several in SPELLINGS.items() for spelling in several])
def test_every_spelling_sets_its_field_and_needs_full_recomputation(field: str, spelling: str) -> None:
    assert resolved(f"{FULL} {spelling}").value_of(field) is True
    assert resolved(f"--recompute-granularity full --recompute-method block {spelling}").value_of(field) is True
    for flags in ("", "--recompute-activations "):
        with pytest.raises(FlagError) as error:
            resolved(f"{flags}{spelling}")
        main = SPELLINGS[field][0]
        assert str(error.value).startswith(f"{main} changes nothing without --recompute-granularity full; give that as well")


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_the_json_is_the_flag_and_what_it_breaks_names_it(tmp_path: Path, key: str) -> None:
    assert with_json(tmp_path, {key: True}).value_of(KEYS[key]) is True
    assert with_json(tmp_path, {key: False}, "").value_of(KEYS[key]) is False
    with pytest.raises(FlagError) as error:
        with_json(tmp_path, {key: True}, "")
    assert f"is activation_checkpointing.{key} true in " in str(error.value)
    with pytest.raises(FlagError, match=r"contradicts activation_checkpointing\.\S+ false"):
        with_json(tmp_path, {key: False}, f"{FULL} {SPELLINGS[KEYS[key]][-1]}")


def test_the_block_of_a_json_that_deepspeed_documents_is_read_as_a_whole(tmp_path: Path) -> None:
    block = {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 4,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    }
    config = with_json(tmp_path, block, f"{FULL} --tensor-model-parallel-size 2")
    assert all(config.value_of(field) for field in SPELLINGS)
    (line,) = [notice for notice in config.notices if "not needed here and ignored" in notice]
    assert all(key in line for key in ("number_checkpoints", "synchronize_checkpoint_boundary", "profile"))


def test_what_divides_nothing_is_said() -> None:
    flag = "--partition-activations"
    assert notices_about(resolved(f"{FULL} {flag}"), flag) == [
        "--partition-activations has no effect with --tensor-model-parallel-size 1, as no ranks share layers"
    ]
    assert notices_about(resolved(f"{FULL} {flag} --tensor-model-parallel-size 2 --sequence-parallel"), flag) == [
        "--partition-activations has no effect with --sequence-parallel, which divides the inputs of recomputed chunks already"
    ]
    assert notices_about(resolved(f"{FULL} {flag} --tensor-model-parallel-size 2"), flag) == []


def test_places_on_the_host_are_always_contiguous() -> None:
    config = resolved(f"{FULL} --checkpoint-in-cpu --contiguous-checkpointing")
    assert notices_about(config, "--contiguous") == ["--contiguous-checkpointing has no effect with --checkpoint-in-cpu"]
