"""The tables of keys."""

import pytest

from megatron_zpp.config.deepspeed_keys import BATCH_KEYS, FIELDS, KEYS, OFF, REFUSED, SECTIONS, WITHOUT_MEANING, asks_for_nothing
from megatron_zpp.config.options import options

ZERO = """stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size overlap_comm sub_group_size offload_param
    offload_optimizer stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather"""
TOP = """gradient_clipping train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print wall_clock_breakdown
    optimizer scheduler amp communication_data_type"""


@pytest.mark.parametrize("key", [f"zero_optimization.{key}" for key in ZERO.split()] + TOP.split())
def test_keys_of_common_files_are_known(key):
    assert key in KEYS


def test_a_key_is_of_one_kind():
    kinds = [set(FIELDS), set(BATCH_KEYS), set(WITHOUT_MEANING), set(REFUSED)]
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
