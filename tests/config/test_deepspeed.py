"""A DeepSpeed JSON beside flags."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.deepspeed import (
    BATCH_KEYS,
    FIELDS,
    KEYS,
    NOT_NEEDED,
    OFF,
    REFUSED,
    SECTIONS,
    WITHOUT_MEANING,
    asks_for_nothing,
    with_deepspeed_json,
)
from megatron_zpp.config.deepspeed_offload import OFFLOAD, OLDER
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.options import options
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 4 --lr 1e-3 "
TUTORIAL_JSON = """
{
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 10000000,
        "reduce_scatter": false,

        "zero_quantized_weights": true,
        "zero_hpz_partition_size": 16,
        "zero_quantized_gradients": true,

        "contiguous_gradients": true,
        "overlap_comm": true
    }
}
"""
TUTORIAL_FLAGS = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 40 --hidden-size 6144 --seq-length 512
    --num-attention-heads 32 --batch-size 1 --zero-stage 3 --deepspeed_config ds_zeropp_config.json --deepspeed-activation-checkpointing
    --fp16 --checkpoint-activations"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, name="ds.json"):
    with open(name, "w", encoding="utf-8") as file:
        file.write(text if isinstance(text, str) else json.dumps(text))


def nested(key, value):
    """The object that holds `value` at a dotted key."""
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {key: value}


def ranks(world_size, tensor=1):
    return RankCounts(world_size, tensor, world_size)


def translated(content, flags="", world_size=4):
    write(content)
    return with_deepspeed_json(parse_flags(f"--deepspeed_config ds.json {flags}".split()), ranks(world_size))


def resolved(content, flags="", world_size=4, local_world_size=2):
    write(content)
    return resolve(parse_flags(f"{SHAPE} --deepspeed_config ds.json {flags}".split()), world_size, local_world_size)


def message_of(function, *arguments):
    with pytest.raises(FlagError) as error:
        function(*arguments)
    text = str(error.value)
    assert "ds.json" in text and "\n" not in text and text[-1] in ".?", text
    return text


# ---- the tutorial


def test_the_tutorials_command_as_printed_in_its_world():
    write(TUTORIAL_JSON, "ds_zeropp_config.json")
    config = resolve(parse_flags(TUTORIAL_FLAGS.split()), 64, 16)
    zero, training = config.zero, config.training
    assert (zero.zero_stage, zero.zero_quantized_weights, zero.zero_hpz_partition_size, zero.zero_quantized_gradients) == (
        3,
        True,
        16,
        True,
    )
    assert (training.micro_batch_size, training.global_batch_size, training.train_iters) == (1, 64, 50)
    assert (config.data.mock_data, config.data.tokenizer_type, config.data.vocab_size) == (True, "NullTokenizer", 50257)
    assert (config.precision.fp16, config.precision.initial_loss_scale) == (True, 65536.0)
    assert config.model.recompute_granularity == "full"
    assert config.assumptions[0].startswith("benchmark mode")
    assert {"--mock-data", "--tokenizer-type NullTokenizer", "--train-iters 50", "--initial-loss-scale 65536.0"} <= set(config.assumptions)


def test_the_tutorials_json_names_in_one_notice_what_has_no_meaning():
    write(TUTORIAL_JSON, "ds_zeropp_config.json")
    notices = resolve(parse_flags(TUTORIAL_FLAGS.split()), 64, 16).notices
    (line,) = [notice for notice in notices if "not needed here and ignored" in notice]
    assert line.endswith(": reduce_bucket_size, reduce_scatter, contiguous_gradients, overlap_comm")
    assert (
        "ds_zeropp_config.json sets --zero-stage 3 --zero-quantized-weights --zero-hpz-partition-size 16 --zero-quantized-gradients"
        in notices
    )


def test_the_tutorials_partition_on_smaller_nodes_is_refused_with_file_key_value_and_remedy():
    write(TUTORIAL_JSON, "ds_zeropp_config.json")
    with pytest.raises(FlagError) as error:
        resolve(parse_flags(TUTORIAL_FLAGS.split()), 64, 8)
    assert str(error.value) == (
        "--zero-hpz-partition-size 16 does not divide the 8 ranks of a node; choose 1, 2, 4 or 8, or start a multiple of 16 ranks per node "
        "(--zero-hpz-partition-size is zero_optimization.zero_hpz_partition_size 16 in ds_zeropp_config.json)."
    )


def test_one_rank_alone_keeps_no_copy_and_is_told_so():
    write(TUTORIAL_JSON, "ds_zeropp_config.json")
    config = resolve(parse_flags(TUTORIAL_FLAGS.split()), 1, None)
    assert config.zero.zero_hpz_partition_size == 1
    assert any(notice.startswith("--zero-hpz-partition-size 16 and ") and "one rank" in notice for notice in config.notices)


# ---- keys that are flags


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("zero_optimization.stage", 2, 2),
        ("zero_optimization.stage", 3.0, 3),
        ("zero_optimization.zero_quantized_weights", True, True),
        ("zero_optimization.zero_hpz_partition_size", 2, 2),
        ("zero_optimization.zero_quantized_gradients", True, True),
        ("fp16.enabled", True, True),
        ("fp16.loss_scale", 128, 128.0),
        ("fp16.initial_scale_power", 16, 65536.0),
        ("fp16.initial_scale_power", 0, 1.0),
        ("fp16.loss_scale_window", 500, 500),
        ("fp16.hysteresis", 4, 4),
        ("fp16.min_loss_scale", 1e-5, 1e-5),
        ("bf16.enabled", True, True),
        ("activation_checkpointing.partition_activations", True, True),
        ("activation_checkpointing.cpu_checkpointing", True, True),
        ("activation_checkpointing.contiguous_memory_optimization", True, True),
        ("checkpoint.use_node_local_storage", True, True),
        ("gradient_clipping", 0.5, 0.5),
        ("gradient_clipping", 0, 0.0),
        ("steps_per_print", 5, 5),
        ("sequence_parallel_size", 2, 2),
    ],
)
def test_a_key_sets_its_field_as_if_given(key, value, expected):
    config = translated(nested(key, value))
    field = FIELDS[key]
    assert config.value_of(field) == expected and type(config.value_of(field)) is type(expected)
    assert config.given == {"deepspeed_config", field}
    assert config.sources == {field: f"{key} {json.dumps(value)} in ds.json"}


def test_every_key_that_is_a_flag_is_in_the_test_above_or_below():
    assert set(FIELDS) == {key for key, _, _ in test_a_key_sets_its_field_as_if_given.pytestmark[0].args[1]}


def test_a_loss_scale_of_0_is_dynamic():
    assert translated({"fp16": {"enabled": True, "loss_scale": 0}}).precision.loss_scale is None


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_null_leaves_the_flag_alone(key):
    assert translated(nested(key, None)).given == {"deepspeed_config"}


@pytest.mark.parametrize("flags, value", [("", 65536.0), ("--initial-loss-scale 8", 8.0), ("--loss-scale 4", 2.0**32)])
def test_with_a_json_the_first_loss_scale_of_fp16_is_deepspeeds_unless_given(flags, value):
    config = resolved({}, f"--fp16 {flags}")
    assert config.precision.initial_loss_scale == value
    assert any("--initial-loss-scale is not given: 65536.0" in notice for notice in config.notices) == (value == 65536.0)


def test_without_a_json_the_first_loss_scale_stays_megatrons():
    assert resolve(parse_flags(f"{SHAPE} --fp16".split()), 1, None).precision.initial_loss_scale == 2.0**32


def test_an_empty_file_changes_nothing():
    config = translated({})
    assert config == Config(given=config.given, notices=config.notices).with_values(deepspeed_config="ds.json")
    assert config.notices == ("ds.json sets no flag",)


def test_without_the_flag_no_file_is_read():
    assert with_deepspeed_json(parse_flags([]), ranks(4)) == Config()


# ---- conflicts

CONFLICTS = [
    ("--zero-stage 3", "zero_optimization.stage", 2),
    ("--zero-quantized-weights", "zero_optimization.zero_quantized_weights", False),
    ("--zero-hpz-partition-size 2", "zero_optimization.zero_hpz_partition_size", 4),
    ("--zero-quantized-gradients", "zero_optimization.zero_quantized_gradients", False),
    ("--fp16", "fp16.enabled", False),
    ("--loss-scale 8.0", "fp16.loss_scale", 16),
    ("--loss-scale 8.0", "fp16.loss_scale", 0),
    ("--initial-loss-scale 8.0", "fp16.initial_scale_power", 16),
    ("--loss-scale-window 5", "fp16.loss_scale_window", 6),
    ("--hysteresis 1", "fp16.hysteresis", 2),
    ("--min-loss-scale 2.0", "fp16.min_loss_scale", 1),
    ("--bf16", "bf16.enabled", False),
    ("--partition-activations", "activation_checkpointing.partition_activations", False),
    ("--checkpoint-in-cpu", "activation_checkpointing.cpu_checkpointing", False),
    ("--contiguous-checkpointing", "activation_checkpointing.contiguous_memory_optimization", False),
    ("--save s --node-local-checkpoints", "checkpoint.use_node_local_storage", False),
    ("--clip-grad 2.0", "gradient_clipping", 1.0),
    ("--context-parallel-size 4", "sequence_parallel_size", 2),
    ("--micro-batch-size 3", "train_micro_batch_size_per_gpu", 1),
    ("--global-batch-size 16", "train_batch_size", 8),
]


@pytest.mark.parametrize("flags, key, value", CONFLICTS)
def test_a_contradiction_names_flag_and_key_with_both_values(flags, key, value):
    text = message_of(translated, nested(key, value), flags)
    flags = flags.removeprefix("--save s ")  # which the other flag needs
    assert text == f"{flags} contradicts {key} {json.dumps(value)} in ds.json; give one of them, or the same value."


def test_every_key_that_is_a_flag_can_contradict():
    free = {"steps_per_print"}
    assert {key for _, key, _ in CONFLICTS} == {*FIELDS, "train_batch_size", "train_micro_batch_size_per_gpu"} - free


@pytest.mark.parametrize(
    "flags, key, value",
    [
        ("--zero-stage 3", "zero_optimization.stage", 3),
        ("--fp16", "fp16.enabled", True),
        ("--initial-loss-scale 65536", "fp16.initial_scale_power", 16),
        ("--clip-grad 1", "gradient_clipping", 1.0),
        ("--batch-size 2", "train_micro_batch_size_per_gpu", 2),
        ("--global-batch-size 16", "train_batch_size", 16),
    ],
)
def test_the_same_value_twice_is_fine(flags, key, value):
    assert translated(nested(key, value), flags).given


# ---- batches


@given(
    micro=st.integers(1, 5),
    steps=st.integers(1, 5),
    world_size=st.integers(1, 9),
    left_out=st.sampled_from(["", "micro", "steps", "total"]),
)
def test_any_two_of_the_batch_keys_give_the_third(tmp_path_factory, micro, steps, world_size, left_out):
    keys = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps, "train_batch_size": micro * steps * world_size}
    names = dict(zip(("micro", "steps", "total"), keys, strict=True))
    file = tmp_path_factory.getbasetemp() / "batch.json"
    file.write_text(json.dumps({key: value for key, value in keys.items() if key != names.get(left_out)}))
    training = with_deepspeed_json(parse_flags(["--deepspeed_config", str(file)]), ranks(world_size)).training
    assert (training.micro_batch_size, training.global_batch_size) == (micro, micro * steps * world_size)


@pytest.mark.parametrize(
    "content, flags, expected",
    [
        ({"train_batch_size": 12}, "", (3, 12)),
        ({"train_batch_size": 12}, "--batch-size 1", (1, 12)),
        ({"train_micro_batch_size_per_gpu": 2}, "", (2, 8)),
        ({"train_micro_batch_size_per_gpu": 2}, "--global-batch-size 16", (2, 16)),
        ({"gradient_accumulation_steps": 3}, "", (1, 12)),
        ({"gradient_accumulation_steps": 3}, "--batch-size 2", (2, 24)),
        ({"gradient_accumulation_steps": 3}, "--global-batch-size 24", (2, 24)),
        ({}, "--batch-size 2", (2, None)),
    ],
)
def test_one_batch_key_is_completed_as_deepspeed_does_and_with_flags(content, flags, expected):
    training = translated(content, flags, world_size=4).training
    assert (training.micro_batch_size, training.global_batch_size) == expected


@pytest.mark.parametrize(
    "content, flags, words",
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "",
            ["train_batch_size 64", "4 x 2 accumulation steps x 4 ranks is 32 and not the batch of 64", "correct one"],
        ),
        ({"train_batch_size": 10}, "", ["train_batch_size 10", "does not divide into 1 accumulation steps on 4 ranks", "a multiple of 4"]),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, "", ["12", "2 accumulation steps on 4 ranks", "a multiple of 8"]),
        (
            {"gradient_accumulation_steps": 2},
            "--batch-size 2 --global-batch-size 8",
            ["gradient_accumulation_steps 2 in ds.json", "--micro-batch-size 2", "--global-batch-size 8", "is 16 and not the batch of 8"],
        ),
        ({"train_batch_size": 0}, "", ["train_batch_size in ds.json: 0 is out of range", "at least 1"]),
    ],
)
def test_batches_that_do_not_agree_are_refused_in_words(content, flags, words):
    text = message_of(translated, content, flags)
    assert all(word in text for word in words), text


def test_a_batch_that_does_not_fit_a_plan_without_a_world_is_answered_with_the_flags_of_the_world():
    keys = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    hint = "correct one of them, or give the world of the plan: --nodes and --ranks-per-node."
    assert message_of(resolved, keys, SHAPE + "--dry-run", 1, 1).endswith(hint)
    for flags in ("", "--dry-run --nodes 1 --ranks-per-node 2"):
        assert message_of(resolved, keys, SHAPE + flags, 2, 2).endswith("correct one of them.")


def test_keys_that_tune_how_deepspeed_works_inside_are_said_to_be_ignored():
    notices = resolved({"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": True}, SHAPE, 1, 1).notices
    assert "ds.json: not needed here and ignored, because they tune how DeepSpeed works inside: overlap_comm" in notices
    assert "ds.json: wall_clock_breakdown has no effect here (use --timing-log-level)" in notices


def test_ranks_that_share_layers_share_the_batch_too_and_an_error_that_comes_from_this_says_so():
    shared = SHAPE + "--tensor-model-parallel-size 2"
    keys = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert resolved(keys, shared, 8, 4).training.global_batch_size == 32
    assert resolved({"gradient_accumulation_steps": 2}, shared, 8, 4).training.global_batch_size == 8
    assert message_of(resolved, {**keys, "train_batch_size": 64}, shared, 8, 4) == (
        "train_batch_size 64 in ds.json with train_micro_batch_size_per_gpu 4 in ds.json with gradient_accumulation_steps 2 in ds.json: "
        "micro-batch 4 x 2 accumulation steps x 4 data-parallel ranks is 32 and not the batch of 64; correct one of them (it would be "
        "right for 8 ranks, but those of --tensor-model-parallel-size 2 have the same samples)."
    )
    assert "have the same samples" not in message_of(resolved, {**keys, "train_batch_size": 40}, shared, 8, 4)
    text = message_of(resolved, {"train_batch_size": 6}, shared, 8, 4)
    assert "does not divide into 1 accumulation steps on 4 data-parallel ranks; choose a multiple of 4." in text


def test_the_size_of_a_sample_group_is_a_key_and_counts_in_the_batch():
    keys = {"sequence_parallel_size": 2, "gradient_accumulation_steps": 3}
    config = resolved(keys, "", 8, 4)
    assert (config.distributed.context_parallel_size, config.training.global_batch_size) == (2, 12)
    assert resolved(keys, "--tensor-model-parallel-size 2", 8, 4).training.global_batch_size == 6
    assert resolved({"train_batch_size": 4}, "--ds-sequence-parallel-size 2", 8, 4).training.micro_batch_size == 1
    text = message_of(resolved, {**keys, "train_batch_size": 24, "train_micro_batch_size_per_gpu": 1}, "", 8, 4)
    assert "3 accumulation steps x 4 sample groups of 2 ranks is 12 and not the batch of 24" in text
    assert "right for 8 ranks, but those of --context-parallel-size 2 have the same samples" in text
    assert message_of(resolved, {**keys, "sequence_parallel_size": 3}, "", 8, 4) == (
        "--context-parallel-size 3 does not divide the 8 ranks of the world; choose 1, 2 or 4 (--context-parallel-size is "
        "sequence_parallel_size 3 in ds.json)."
    )


def test_the_size_of_a_tensor_group_is_a_flag_and_no_key():
    text = message_of(translated, {"tensor_parallel": {"autotp_size": 2}})
    assert text.endswith("is not available; use --tensor-model-parallel-size.")


def test_a_batch_of_the_json_that_does_not_split_names_its_key():
    text = message_of(resolved, {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 1})
    assert "--global-batch-size 10 is not a multiple of 4" in text and "train_batch_size 10 in ds.json" in text


# ---- keys that mean nothing here, are not available, or do not exist


@pytest.mark.parametrize("key", sorted(WITHOUT_MEANING))
def test_a_key_without_meaning_is_listed_and_changes_nothing(key):
    for value in (True, False, 5, "auto", {"block_size": 1}):
        config = translated(nested(key, value))
        assert config.given == {"deepspeed_config"}
        assert config.notices[-1].endswith(f"how DeepSpeed works inside: {key.rpartition('.')[2]}")


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_that_is_not_available_is_refused_unless_neutral(key):
    neutral, remedy = REFUSED[key]
    for value in neutral:
        assert translated(nested(key, value)).notices == ("ds.json sets no flag",)
    others = [value for value in (True, 17, "bf16", {"device": "cpu"}, {"enabled": True, "type": "x"}) if value not in neutral]
    for value in others:
        assert message_of(translated, nested(key, value)) == f"{key} {json.dumps(value)} in ds.json is not available; {remedy}."


@pytest.mark.parametrize(
    "content",
    [
        {"zero_optimization": {"offload_param": {"device": "none"}, "offload_optimizer": {}}},
        {"zero_optimization": {"mics_shard_size": -1, "zeropp_loco_param": None}},
        {"amp": {"enabled": False, "opt_level": "O1"}, "tensorboard": {"enabled": False}},
        {"zero_optimization": None, "fp16": {}, "optimizer": {}},
    ],
)
def test_what_is_turned_off_is_accepted(content):
    assert translated(content).given == {"deepspeed_config"}


@pytest.mark.parametrize(
    "key, usual, other, reason",
    [
        ("bf16.check_grad_overflow", True, False, "a step whose gradient is not finite is always skipped"),
        ("zero_optimization.compute_grad_norm", True, False, "the norm is always computed"),
        ("prescale_gradients", False, True, "the mean of gradients is the same"),
        ("comms_logger", {"enabled": False, "verbose": True}, {"enabled": True}, "--log-jsonl always has the bytes"),
    ],
)
def test_a_key_that_asks_for_something_else_than_is_done_anyway_gets_a_line(key, usual, other, reason):
    assert translated(nested(key, usual)).notices == ("ds.json sets no flag",)
    assert translated(nested(key, other)).notices[-1].startswith(f"ds.json: {key} has no effect here ({reason}")


def test_the_older_name_of_the_bf16_section_is_read_and_never_beside_the_new_one():
    assert translated({"bfloat16": {"enabled": True}}).precision.bf16
    text = message_of(translated, {"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})
    assert text == "bfloat16 and bf16 in ds.json are two names of one section; leave bfloat16 out."


def test_who_asks_for_gradients_in_fp32_on_the_links_is_not_sent_to_fewer_bits():
    assert message_of(translated, {"communication_data_type": "fp32"}) == (
        'communication_data_type "fp32" in ds.json is not available; gradients cross links in the working precision, with '
        "--zero-quantized-gradients in fewer bits; leave the key out."
    )


@pytest.mark.parametrize("key", [*sorted(FIELDS), *sorted(REFUSED), "train_batch_size", "gradient_accumulation_steps"])
def test_auto_is_refused(key):
    text = message_of(translated, nested(key, "auto"))
    assert text.startswith(f'{key} "auto" in ds.json is filled in by another program; write the value')


def test_every_key_that_cannot_be_used_is_named_at_once():
    with pytest.raises(FlagError) as error:
        translated({"train_batch_size": "auto", "optimizer": {"type": "AdamW"}, "fp16": {"enabled": "auto", "scale": 1}})
    assert [line.split()[0] for line in str(error.value).splitlines()] == ["train_batch_size", "optimizer", "fp16.enabled", "fp16.scale"]


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.zero_quantized_weight", "zero_optimization.zero_quantized_weights"),
        ("zero_optimization.zero_hpz_size", "zero_optimization.zero_hpz_partition_size"),
        ("zero_optimization.Stage", "zero_optimization.stage"),
        ("zero_quantized_gradients", "zero_optimization.zero_quantized_gradients"),
        ("fp16.initial_scale", "fp16.initial_scale_power"),
        ("bf16.enable", "bf16.enabled"),
        ("train_batchsize", "train_batch_size"),
        ("fp16.gradient_clipping", "gradient_clipping"),
    ],
)
def test_an_unknown_key_at_any_level_is_refused_with_the_nearest(key, nearest):
    text = message_of(translated, nested(key, 1))
    assert text == f"{key} in ds.json is not a key of a DeepSpeed configuration; did you mean {nearest}?"


def test_an_unknown_key_without_a_neighbour_is_refused():
    assert message_of(translated, {"xyzzy": 1}).endswith("; correct or remove it.")


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("zero_optimization.stage", 4, "4 is not available; choose 0, 1, 2 or 3"),
        ("zero_optimization.stage", "3", "is not a whole number"),
        ("zero_optimization.stage", True, "is not a whole number"),
        ("zero_optimization.stage", 2.5, "is not a whole number"),
        ("zero_optimization.zero_hpz_partition_size", 0, "0 is out of range; choose a value that is at least 1"),
        ("zero_optimization.zero_quantized_weights", 1, "is not true or false"),
        ("fp16.enabled", "yes", "is not true or false"),
        ("fp16.initial_scale_power", 127, "127 is out of range; choose a value that is at least 0 and at most 126"),
        ("fp16.initial_scale_power", -1, "-1 is out of range"),
        ("fp16.loss_scale", -1, "-1.0 is out of range"),
        ("fp16.hysteresis", 0, "0 is out of range"),
        ("gradient_clipping", "1.0", "is not a number"),
        ("gradient_clipping", [1], "is not a number"),
        ("train_batch_size", 1.5, "is not a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_or_range_is_named_with_its_key(key, value, words):
    text = message_of(translated, nested(key, value))
    assert text.startswith(f"{key} ") and words in text, text


@pytest.mark.parametrize("section", ["zero_optimization", "fp16", "bf16"])
def test_a_section_that_is_no_object_is_refused(section):
    assert (
        message_of(translated, {section: True}) == f"{section} true in ds.json is not an object; write {section} with its keys in braces."
    )


# ---- files


@pytest.mark.parametrize(
    "text, words",
    [
        ('{\n  "fp16": {"enabled": true,}\n}', "is not JSON: line 2, column "),
        (
            '{\n  "fp16": {"enabled": true}\n  "bf16": {}\n}',
            "is not JSON: line 3, column 3: Expecting ',' delimiter; give the path of a JSON object.",
        ),
        ("", "is not JSON: line 1, column 1"),
        ("[]", "must be a JSON object, not []"),
        ('{"steps_per_print": 1e999}', "steps_per_print must be a finite number below 2^63, not Infinity"),
        ('{"fp16": {"loss_scale": NaN}}', "fp16.loss_scale must be a finite number below 2^63, not NaN"),
        ('{"fp16": {}, "fp16": {}}', "--deepspeed_config ds.json has fp16 twice in one object"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "has enabled twice in one object"),
    ],
)
def test_a_file_that_cannot_be_understood_is_named_with_the_place(text, words):
    assert words in message_of(translated, text)


def test_a_missing_file_and_a_folder_are_named():
    with pytest.raises(
        FlagError, match="^--deepspeed_config nothing.json does not exist on this machine; give the path of a JSON object.$"
    ):
        with_deepspeed_json(parse_flags("--deepspeed_config nothing.json".split()), ranks(1))
    with pytest.raises(FlagError, match="Is a directory"):
        with_deepspeed_json(parse_flags("--deepspeed_config .".split()), ranks(1))


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(FlagError, match="ds.json is not UTF-8 text"):
        with_deepspeed_json(parse_flags("--deepspeed_config ds.json".split()), ranks(1))


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xef\xbb\xbf{}")
    assert with_deepspeed_json(parse_flags("--deepspeed_config ds.json".split()), ranks(1)).notices == ("ds.json sets no flag",)


# ---- later messages name the source


@pytest.mark.parametrize(
    "content, flags, words",
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "", ["--fp16 is fp16.enabled true", "--bf16 is bf16.enabled true"]),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "--zero-stage 0",
            ["zero_optimization.zero_quantized_weights true in ds.json"],
        ),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 2}},
            "--zero-stage 2",
            ["zero_hpz_partition_size 2 in ds.json", "--zero-stage 3"],
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 2}}, "", ["initial_scale_power 0", "min_loss_scale 2"]),
    ],
)
def test_a_rule_that_the_json_breaks_names_file_and_key(content, flags, words):
    text = message_of(resolved, content, flags)
    assert all(word in text for word in words), text


def test_a_flag_of_the_command_line_has_no_source_in_messages():
    with pytest.raises(FlagError) as error:
        resolved({"zero_optimization": {"stage": 3}}, "--fp16 --bf16")
    assert "ds.json" not in str(error.value)


# ---- the tables of keys

ZERO = """stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size overlap_comm sub_group_size offload_param
    offload_optimizer stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather allgather_sequential
    stage3_allgather_sequential parameter_alignment enable_sanity_checks compute_grad_norm save_muon_momentum_buffer_in_memory leaf_module
    module_granularity_threshold log_trace_cache_warnings"""
TOP = """gradient_clipping train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print wall_clock_breakdown
    optimizer scheduler amp communication_data_type gradient_allreduce_op managed_gradient_accumulation disable_python_gc log_level
    weight_quantization expert_parallel datastates_ckpt data_types.param_dtype data_types.buffer_dtype data_types.keep_in_fp32_modules
    checkpoint.writer checkpoint.checkpoint_serialization"""


@pytest.mark.parametrize("key", [f"zero_optimization.{key}" for key in ZERO.split()] + TOP.split())
def test_keys_of_common_files_are_known(key):
    assert key in KEYS


def test_a_key_is_of_one_kind():
    kinds = [set(FIELDS), set(BATCH_KEYS), {OFFLOAD, OLDER}, set(WITHOUT_MEANING), set(NOT_NEEDED), set(REFUSED)]
    assert sum(len(kind) for kind in kinds) == len(KEYS)
    assert not SECTIONS & KEYS


def test_fields_exist_and_are_set_by_one_key_each():
    names = {option.name for option in options()}
    assert set(FIELDS.values()) <= names
    assert len(set(FIELDS.values())) == len(FIELDS)


def test_flags_named_as_remedies_exist():
    words = {word.rstrip(",") for _, remedy in REFUSED.values() for word in remedy.split() if word.startswith("--")}
    assert words <= {spelling for option in options() for spelling in option.all_spellings}


@pytest.mark.parametrize("value", [None, False, {}, {"device": "none"}, {"device": "none", "pin_memory": True}, {"enabled": False, "x": 1}])
def test_off_in_every_spelling_asks_for_nothing(value):
    assert asks_for_nothing(value, OFF)


@pytest.mark.parametrize("value", [True, 0, 1, "", "cpu", [], {"device": "cpu"}, {"enabled": True}, {"enabled": 0}, {"type": "Adam"}])
def test_anything_else_asks_for_something(value):
    assert not asks_for_nothing(value, OFF)


def test_true_is_not_one():
    assert asks_for_nothing(1.0, (1,)) and not asks_for_nothing(True, (1,))


def test_what_is_done_anyway_is_accepted_with_a_line_that_says_so():
    config = translated({"prescale_gradients": True, "flops_profiler": {"enabled": True}, "comms_logger": {"enabled": False}, "timers": {}})
    assert config.given == {"deepspeed_config"}
    assert config.notices[1:] == (
        "ds.json: prescale_gradients has no effect here (the mean of gradients is the same wherever it is divided)",
        "ds.json: flops_profiler has no effect here (training lines always have the FLOP/s)",
    )


def test_the_interval_of_lines_may_differ_from_that_of_deepspeeds_own_lines():
    assert translated({"steps_per_print": 1}, "--log-interval 100").logging.log_interval == 100
    assert translated({"steps_per_print": 10}).logging.log_interval == 10
