"""--zeropp: what a set of flags sets, in every world, and what contradicts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config, ZeroConfig

RUN = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --train-iters 4 --lr 1e-3"
WORLDS = [(1, 1), (2, 2), (4, 4), (2, 1), (3, 1), (4, 2), (12, 4)]  # ranks, ranks per node
PAPER = "--zero-stage 3 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size {ranks_per_node}"
GAUSSIAN = "--zero-quantized-weight-differences --zero-quantized-gradients --zero-quantized-gradients-code gaussian"
LEAN = f"--zero-stage 3 {GAUSSIAN} --zero-hpz-partition-size {{ranks_per_node}}"


def resolved(flags: str, world: tuple[int, int] = (4, 2)) -> Config:
    return resolve(parse_flags(f"{RUN} {flags}".split()), *world)


def refused(flags: str, world: tuple[int, int] = (4, 2)) -> str:
    with pytest.raises(FlagError) as error:
        resolved(flags, world)
    return str(error.value)


def zero_without_name(config: Config) -> dict[str, object]:
    values = {name: config.value_of(name) for name in ZeroConfig.__dataclass_fields__}
    return {**values, "zeropp": None}


def written_by_a_file(tmp_path: Path, **keys: object) -> str:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": keys}))
    return f"--deepspeed_config {file}"


# ---- what a set sets


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("name, flags", [("paper", PAPER), ("lean", LEAN)])
def test_a_set_is_the_flags_that_its_notice_lists_in_every_world(name: str, flags: str, world: tuple[int, int]) -> None:
    spelled = flags.format(ranks_per_node=world[1])
    if name == "lean" and world[0] > world[1] == 1:
        text = refused("--zeropp lean", world)
        assert "each node has one rank; choose --zero-stage 2" in text and "set by --zeropp lean" in text
        return
    by_name, by_flags = resolved(f"--zeropp {name}", world), resolved(spelled, world)
    assert zero_without_name(by_name) == zero_without_name(by_flags)
    assert by_name.notices == (f"--zeropp {name} sets {spelled}", *by_flags.notices)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("stage", [1, 2])
def test_lean_in_stages_1_and_2_keeps_the_stage_and_every_world_accepts_it(stage: int, world: tuple[int, int]) -> None:
    config = resolved(f"--zeropp lean --zero-stage {stage}", world)
    assert (config.zero.zero_stage, config.zero.zero_hpz_partition_size) == (stage, 1)
    assert config.notices[0] == f"--zeropp lean sets {GAUSSIAN}"


@pytest.mark.parametrize("name", ["paper", "lean"])
def test_a_given_partition_stays(name: str) -> None:
    config = resolved(f"--zeropp {name} --zero-hpz-partition-size 2", (8, 4))
    assert config.zero.zero_hpz_partition_size == 2 and "partition" not in config.notices[0]


def test_flags_that_a_set_implies_may_be_given_as_well() -> None:
    config = resolved("--zeropp lean " + LEAN.format(ranks_per_node=2))
    assert config.notices == ("--zeropp lean sets nothing that is not given",)


def test_lean_codes_in_3_bits_between_nodes_and_8_inside_unless_bits_are_given() -> None:
    zero = resolved("--zeropp lean").zero
    bits = (
        zero.zero_quantized_weight_differences_bits,
        zero.zero_quantized_gradients_inter_bits,
        zero.zero_quantized_gradients_intra_bits,
    )
    assert bits == (3, 3, 8)
    zero = resolved("--zeropp lean --zero-quantized-weight-differences-bits 1 --zero-quantized-gradients-inter-bits 4").zero
    assert (zero.zero_quantized_weight_differences_bits, zero.zero_quantized_gradients_inter_bits) == (1, 4)


def test_paper_codes_gradients_in_4_bits_and_weights_in_8() -> None:
    zero = resolved("--zeropp paper").zero
    assert (zero.zero_quantized_weights_bits, zero.zero_quantized_gradients_inter_bits, zero.zero_quantized_gradients_intra_bits) == (
        8,
        4,
        4,
    )


@pytest.mark.parametrize(
    "flags, where",
    [
        ("--zeropp lean", "primary"),  # one micro-batch
        ("--zeropp lean --global-batch-size 8", "secondary"),
        ("--zeropp lean --zero-stage 2 --global-batch-size 8", "secondary"),
        ("--zeropp lean --zero-stage 1 --global-batch-size 8", "primary"),
        ("--zeropp lean --global-batch-size 8 --zero-gradients-between-microbatches primary", "primary"),
        ("--zeropp paper --global-batch-size 8", "primary"),
        ("--zeropp paper --global-batch-size 8 --zero-gradients-between-microbatches secondary", "secondary"),
    ],
)
def test_lean_adds_up_several_micro_batches_inside_partitions(flags: str, where: str) -> None:
    assert resolved(flags).zero.zero_gradients_between_microbatches == where


def test_without_a_set_nothing_changes() -> None:
    config = resolved("--zero-stage 3")
    assert config.zero.zeropp is None and not config.notices


# ---- contradictions


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize(
    "flags, words",
    [
        ("--zeropp paper --zero-stage 2", ["--zero-stage 2 contradicts --zeropp paper, which sets --zero-stage 3"]),
        ("--zeropp lean --zero-stage 0", ["--zero-stage 0 contradicts --zeropp lean", "choose --zero-stage 1, 2 or 3"]),
        ("--zeropp lean --zero-quantized-weights", ["--zero-quantized-weights contradicts --zeropp lean", "differences", "leave one"]),
        (
            "--zeropp paper --zero-quantized-weight-differences",
            ["-differences contradicts --zeropp paper", "quantized weights", "leave one"],
        ),
        ("--zeropp paper --zero-quantized-gradients-code gaussian", ["-code gaussian contradicts --zeropp paper", "absmax", "leave one"]),
        (
            "--zeropp lean --zero-quantized-gradients-code absmax",
            ["-code absmax contradicts --zeropp lean, which sets --zero-quantized-gradients-code gaussian", "leave one"],
        ),
    ],
)
def test_a_contradiction_names_both_in_every_world(flags: str, words: list[str], world: tuple[int, int]) -> None:
    text = refused(flags, world)
    assert all(word in text for word in words) and text.endswith("."), text


@pytest.mark.parametrize("name", ["paper", "lean"])
def test_a_partition_of_1_contradicts_a_set_where_nodes_have_several_ranks(name: str) -> None:
    text = refused(f"--zeropp {name} --zero-hpz-partition-size 1")
    assert text.startswith(f"--zero-hpz-partition-size 1 contradicts --zeropp {name}, which sets --zero-hpz-partition-size 2;")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--quantization-block-size 128", ["--quantization-block-size 128", "multiple of 256", "-differences is set by --zeropp lean"]),
        ("--zero-quantized-gradients-inter-bits 8", ["-inter-bits 8", "1, 2, 3 or 4", "-code is set to gaussian by --zeropp lean"]),
        ("--zero-quantized-gradients-intra-bits 4", ["-intra-bits 4", "choose 8", "-code is set to gaussian by --zeropp lean"]),
        ("--zero-quantized-gradients-rotation hadamard", ["-rotation hadamard", "-code is set to gaussian by --zeropp lean"]),
        ("--zero-quantized-gradients-rounding stochastic", ["-rounding stochastic", "-code is set to gaussian by --zeropp lean"]),
        ("--zero-quantized-weights-bits 4", ["--zero-quantized-weights-bits 4 changes nothing without --zero-quantized-weights"]),
    ],
)
def test_an_error_about_a_flag_that_lean_implies_names_lean(flags: str, words: list[str]) -> None:
    text = refused(f"--zeropp lean {flags}")
    assert all(word in text for word in words), text


def test_another_name_is_refused_with_the_names_that_exist() -> None:
    assert all(word in refused("--zeropp leen") for word in ("--zeropp leen", "paper or lean"))


# ---- beside a DeepSpeed JSON


def test_a_file_that_agrees_with_a_set_changes_nothing(tmp_path: Path) -> None:
    keys = written_by_a_file(tmp_path, stage=3, zero_quantized_gradients=True, zero_quantized_weights=False, zero_hpz_partition_size=2)
    zero = resolved(f"--zeropp lean {keys}").zero
    assert (zero.zero_stage, zero.zero_quantized_weight_differences, zero.zero_hpz_partition_size) == (3, True, 2)
    assert not zero.zero_quantized_weights


def test_a_file_chooses_the_stage_of_lean(tmp_path: Path) -> None:
    assert resolved(f"--zeropp lean {written_by_a_file(tmp_path, stage=2)}").zero.zero_stage == 2


@pytest.mark.parametrize(
    "name, keys, start",
    [
        ("paper", {"stage": 2}, "--zero-stage 2 contradicts --zeropp paper, which sets --zero-stage 3; leave one of them out"),
        ("lean", {"stage": 0}, "--zero-stage 0 contradicts --zeropp lean"),
        ("lean", {"zero_quantized_weights": True}, "--zero-quantized-weights contradicts --zeropp lean, which sends differences"),
        ("lean", {"zero_quantized_gradients": False}, "no --zero-quantized-gradients contradicts --zeropp lean, which sets it; leave"),
        ("paper", {"zero_quantized_weights": False}, "no --zero-quantized-weights contradicts --zeropp paper, which sets it; leave"),
        ("lean", {"zero_hpz_partition_size": 1}, "--zero-hpz-partition-size 1 contradicts --zeropp lean, which sets --zero-hpz-part"),
    ],
)
def test_a_key_that_contradicts_a_set_is_named_with_its_value_and_file(
    tmp_path: Path, name: str, keys: dict[str, object], start: str
) -> None:
    text = refused(f"--zeropp {name} {written_by_a_file(tmp_path, **keys)}")
    ((key, value),) = keys.items()
    assert text.startswith(start) and f"is zero_optimization.{key} {json.dumps(value)} in {tmp_path}" in text, text
