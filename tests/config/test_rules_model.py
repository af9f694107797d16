"""Rules between the flags of the architecture."""

from __future__ import annotations

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 1 --lr 1 --mock-data"


def resolved(flags: str) -> Config:
    return resolve(parse_flags(f"{SHAPE} {flags}".split()), 1, None)


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ("", 4),
        ("--num-query-groups 2", 2),
        ("--num-key-value-heads 2", 2),
        ("--group-query-attention --num-query-groups 2", 2),
        ("--group-query-attention", 1),
        ("--group-query-attention --num-key-value-heads 4", 4),
    ],
)
def test_query_groups_are_inferred_from_either_spelling(flags: str, groups: int) -> None:
    model = resolved(flags).model
    assert (model.num_query_groups, model.key_value_heads, model.qkv_width) == (groups, groups, 16 * (4 + 2 * groups))


@pytest.mark.parametrize(
    ("hidden", "ffn"),
    [(4096, 10880), (1024, 2688), (64, 128), (24, 64)],  # int(4 h * 2 / 3 / 64) * 64, by hand
)
def test_the_width_of_a_gated_feed_forward_layer_is_megatrons(hidden: int, ffn: int) -> None:
    assert resolved(f"--swiglu --hidden-size {hidden}").model.ffn_hidden_size == ffn


@pytest.mark.parametrize("hidden", [16, 4096])  # 16 has no default
def test_a_gated_feed_forward_layer_has_the_width_that_is_given(hidden: int) -> None:
    assert resolved(f"--swiglu --hidden-size {hidden} --ffn-hidden-size 7").model.ffn_hidden_size == 7


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", "learned_absolute"),
        ("--use-rotary-position-embeddings", "rope"),
        ("--position-embedding-type ROPE", "rope"),
        ("--no-position-embedding", "none"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
        ("--no-position-embedding --position-embedding-type none", "none"),
    ],
)
def test_positions_are_learned_unless_a_flag_says_otherwise(flags: str, kind: str) -> None:
    assert resolved(flags).model.position_embedding_type == kind


@pytest.mark.parametrize("flags", ["--position-embedding-type rope", "--position-embedding-type none"])
def test_only_learned_positions_have_an_end(flags: str) -> None:
    assert resolved(f"{flags} --max-position-embeddings 8").model.max_position_embeddings == 8
    with pytest.raises(FlagError, match="--max-position-embeddings 8 is below --seq-length 32"):
        resolved("--max-position-embeddings 8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-query-groups 3", "--num-query-groups 3 does not divide --num-attention-heads 4; choose 1, 2 or 4."),
        ("--num-query-groups 8", "--num-query-groups 8 does not divide --num-attention-heads 4; choose 1, 2 or 4."),
        ("--num-query-groups 0", "--num-query-groups 0 is out of range; choose a value that is at least 1."),
        ("--num-query-groups 2 --num-key-value-heads 4", "--num-query-groups 2 and --num-key-value-heads 4 are two values for one setting"),
        ("--swiglu --squared-relu", "--swiglu and --squared-relu exclude each other; give one of them."),
        ("--swiglu --hidden-size 16", "--swiglu with --hidden-size 16 leaves the feed-forward layer no width, .* give --ffn-hidden-size."),
        (
            "--use-rotary-position-embeddings --rotary-percent 0.45",
            "--rotary-percent 0.45 rotates 7 of a head's 16 channels, which are not pairs; "
            "choose --rotary-percent 0.375, --rotary-percent 0.5 or another --kv-channels.",
        ),
        (
            "--use-rotary-position-embeddings --rotary-percent 0.01",
            "--rotary-percent 0.01 rotates 0 of a head's 16 channels, which are not pairs; "
            "choose --rotary-percent 0.125 or another --kv-channels.",
        ),
        ("--use-rotary-position-embeddings --kv-channels 1", "rotates 1 of a head's 1 channels, .*; choose an even --kv-channels."),
        ("--rotary-percent 1.5", "--rotary-percent 1.5 is out of range; choose a value that is above 0 and at most 1."),
        ("--rotary-base 0", "--rotary-base 0.0 is out of range"),
        (
            "--use-rotary-position-embeddings --use-rope-scaling --rope-scaling-low-freq-factor 4",
            "--rope-scaling-high-freq-factor 4.0 is not above --rope-scaling-low-freq-factor 4.0; choose a value above 4.0.",
        ),
        (
            "--no-position-embedding --position-embedding-type learned_absolute",
            "--no-position-embedding and --position-embedding-type learned_absolute exclude each other; give one of them.",
        ),
        (
            "--apply-layernorm-1p --norm-backend apex",
            "--apply-layernorm-1p is not available with --norm-backend apex; choose --norm-backend torch.",
        ),
        ("--normalization GroupNorm", "--normalization GroupNorm is not available; choose LayerNorm or RMSNorm."),
        ("--attention-backend cudnn", "--attention-backend cudnn is not available; choose auto, flash, fused, unfused or local."),
    ],
)
def test_a_contradiction_is_named_with_flag_value_rule_and_remedy(flags: str, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        resolved(flags)


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("--rotary-base 500000", "--rotary-base has no effect without --position-embedding-type rope"),
        ("--use-rope-scaling", "--use-rope-scaling has no effect without --position-embedding-type rope"),
        ("--use-rotary-position-embeddings --rope-scaling-factor 4", "--rope-scaling-factor has no effect without --use-rope-scaling"),
        ("--position-embedding-type none --reset-position-ids", "--reset-position-ids has no effect with --position-embedding-type none"),
        ("--add-qkv-bias", "--add-qkv-bias has no effect without --disable-bias-linear, as every linear layer has a bias"),
    ],
)
def test_a_flag_that_changes_nothing_is_named(flags: str, notice: str) -> None:
    assert notice in resolved(flags).notices


def test_dropout_that_nobody_asked_for_is_named_where_it_surprises() -> None:
    line = "--attention-dropout 0.1 and --hidden-dropout 0.1: Megatron's default, and not given; models of the Llama kind train with 0"
    assert line in resolved("--swiglu").notices and line in resolved("--normalization RMSNorm").notices
    assert not any("Megatron's default" in notice for notice in resolved("").notices)
    silent = resolved("--use-rotary-position-embeddings --attention-dropout 0.1 --hidden-dropout 0").notices
    assert not any("Megatron's default" in notice for notice in silent)


def test_flags_that_say_what_is_the_case_anyway_are_accepted_with_a_line() -> None:
    flags = "--use-flash-attn --use-flash-attn-v2 --use-flash-attn-triton --no-persist-layer-norm --no-rope-fusion"
    notices = [notice for notice in resolved(flags).notices if notice.startswith("accepted, has no effect here:")]
    assert [notice.split()[5] for notice in notices] == flags.split()
