"""The schema as data: names, kinds and defaults of every flag."""

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from megatron_zpp.config.flag import (
    DIGITS,
    LARGEST_COUNT,
    LARGEST_LAYERS,
    LARGEST_LENGTH,
    LARGEST_MINUTES,
    LARGEST_TOKENS,
    LARGEST_VOCABULARY,
    LARGEST_WIDTH,
    REQUIRED,
    Bounds,
)
from megatron_zpp.config.obsolete import ACCEPTED, REFUSED
from megatron_zpp.config.options import options
from megatron_zpp.config.schema import GROUPS, Config

MEGATRON_DEFAULTS = {
    "make_vocab_size_divisible_by": 128,
    "norm_epsilon": 1e-5,
    "init_method_std": 0.02,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "seed": 1234,
    "eval_interval": 1000,
    "eval_iters": 100,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "initial_loss_scale": 4294967296.0,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "distributed_timeout_minutes": 10,
    "split": "969, 30, 1",
    "num_workers": 2,
    "log_interval": 100,
    "tensorboard_log_interval": 1,
    "tensorboard_queue_size": 1000,
}


def test_importing_config_leaves_torch_out():
    rooms = ", ".join(f"megatron_zpp.config.{name}" for name in ("cli", "resolve", "flags_page"))
    program = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_field_names_are_unique_among_groups():
    names = [option.name for option in options()]
    assert len(names) == len(set(names))


def test_spellings_are_unique_and_none_is_refused():
    spellings = [spelling for option in options() for spelling in option.all_spellings]
    assert len(spellings) == len(set(spellings))
    assert not set(REFUSED) & (set(spellings) | set(ACCEPTED))


@pytest.mark.parametrize("name, default", MEGATRON_DEFAULTS.items())
def test_defaults_are_megatrons(name, default):
    assert Config().value_of(name) == default


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_default_is_of_the_fields_kind_and_allowed(option):
    if option.default is None:
        return
    assert type(option.default) is option.kind
    if isinstance(option.flag.allowed, Bounds):
        assert option.flag.allowed.contain(option.default)
    elif option.flag.allowed is not None:
        assert option.default in option.flag.allowed


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_every_number_has_bounds_and_a_unit(option):
    if option.kind in (int, float):
        assert option.flag.allowed is not None
        assert option.flag.unit or isinstance(option.flag.allowed, tuple)


def test_the_shape_of_the_model_is_what_the_user_must_say():
    required = {option.name for option in options() if option.flag.otherwise == REQUIRED}
    assert required == {"num_layers", "hidden_size", "num_attention_heads", "seq_length"}


def test_configuration_is_frozen():
    for group in GROUPS:
        members = getattr(Config(), group)
        with pytest.raises(FrozenInstanceError):
            setattr(members, next(iter(vars(members))), 1)


def test_with_values_replaces_fields_of_several_groups_and_nothing_else():
    config = Config().with_values(num_layers=3, lr=0.5)
    assert (config.model.num_layers, config.optimizer.lr) == (3, 0.5)
    assert config.with_values(num_layers=None, lr=None) == Config()


@pytest.mark.parametrize(
    "bounds, inside, outside",
    [
        (Bounds(at_least=1), [1, 5], [0, -1]),
        (Bounds(above=0), [1e-30], [0.0, -1.0]),
        (Bounds(at_least=0, below=1), [0.0, 0.999], [1.0, -0.1]),
        (Bounds(at_least=0, at_most=3), [0, 3], [4]),
        (Bounds(at_least=32, multiple_of=32), [32, 96], [0, 33, -32]),
        (Bounds(), [0.0], []),
    ],
)
def test_bounds_contain_what_they_say_and_nothing_that_is_not_finite(bounds, inside, outside):
    assert all(bounds.contain(value) for value in inside)
    assert not any(bounds.contain(value) for value in [*outside, float("nan"), float("inf"), float("-inf")])


def test_no_number_is_without_a_largest_value():
    bounds = {option.name: option.flag.allowed for option in options() if option.kind in (int, float)}
    unbounded = [
        name
        for name, allowed in bounds.items()
        if not isinstance(allowed, tuple) and {allowed.limit, allowed.at_most, allowed.below} == {None}
    ]
    assert bounds and unbounded == []


def test_the_largest_run_can_be_counted_in_64_bits():
    assert LARGEST_COUNT * LARGEST_LENGTH <= LARGEST_TOKENS < 10**DIGITS and LARGEST_TOKENS < 2**63
    assert LARGEST_LAYERS * 12 * LARGEST_WIDTH**2 + 2 * LARGEST_VOCABULARY * LARGEST_WIDTH < 2**58  # parameters, of 16 bytes each
    assert LARGEST_MINUTES * 60 * 10**9 < 2**63
