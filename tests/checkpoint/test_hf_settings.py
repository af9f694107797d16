"""Settings of a config.json: what transformers would use, or a refusal by name. transformers is the independent reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from megatron_zpp.checkpoint.hf.layouts import layout_of_type
from megatron_zpp.checkpoint.hf.settings import setting
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError

LLAMA_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_attention_heads": 32,
    "max_position_embeddings": 16,
}
BASES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 32, "n_positions": 16},
    "llama": LLAMA_SIZES,
    "mistral": LLAMA_SIZES | {"sliding_window": None},
    "qwen2": LLAMA_SIZES,
    "qwen3": LLAMA_SIZES,
}
BASES = {kind: {"model_type": kind, "vocab_size": 61, **sizes} for kind, sizes in BASES.items()}
NONSENSE: list[Any] = [None, "", "x", "2", True, False, -1, 0, 1, 2, 64, 128, 10**30, -0.5, 0.0, 0.5, 1.5, float("nan"), float("inf")]
NONSENSE += [[], [1], ["x"], ["full_attention"] * 2, ["full_attention"] * 3, ["sliding_attention"] * 2, {}, {"x": 1}]
SCALINGS: list[tuple[str, dict[str, Any]]] = [
    ("rope_parameters", {"rope_theta": 5e5}),
    ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
]
SCALING_KEYS = ("rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
MORE_KEYS = """
    architectures attention_bias attention_multiplier attn_logit_softcapping dtype embedding_multiplier final_logit_softcapping head_dim
    hidden_act hidden_size is_causal layer_types logit_scale logits_scaling max_position_embeddings max_window_layers mlp_bias num_experts
    num_attention_heads num_hidden_layers num_key_value_heads num_local_experts partial_rotary_factor per_layer_config pretraining_tp
    pruned_heads quantization_config residual_multiplier rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings
    torch_dtype transformers_version use_sliding_window
    """.split()
# No number of the logits, and nothing in the checkpoint, depends on these.
UNUSED = frozenset(
    """
    _name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label is_encoder_decoder label2id
    max_window_layers output_attentions output_hidden_states pad_token_id pretraining_tp problem_type return_dict summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj torch_dtype transformers_version use_cache
    """.split()
)
WITHOUT_WINDOW = frozenset({"sliding_window"})  # use_sliding_window is false
UNUSED_BY = {
    "gpt2": frozenset({"rope_parameters", "rope_scaling"}),
    "llama": WITHOUT_WINDOW,
    "mistral": frozenset[str](),
    "qwen2": WITHOUT_WINDOW,
    "qwen3": WITHOUT_WINDOW,
}
FLOATS = ("initializer_range", "layer_norm_epsilon", "rms_norm_eps")
WIDER = {"initializer_range": {"initializer_range": 0.5}}  # of a Llama transformers allows 1 at most; any positive number makes sense


def settings_of(config: dict[str, Any]) -> Members:
    return Members(config, OutsideFile(Path("config.json"), "config.json", "correct it."))


def model_of(config: dict[str, Any]) -> ModelConfig:
    return layout_of_type(settings_of(config)).model_config(settings_of(config))


def theirs(config: dict[str, Any]) -> PreTrainedConfig:
    values = json.loads(json.dumps(config))  # transformers changes objects that it is given
    return type(AutoConfig.for_model(config["model_type"])).from_dict(values)


def expected(config: PreTrainedConfig) -> dict[str, Any]:
    """The model that transformers builds from its configuration, in our fields."""
    positions = config.max_position_embeddings
    found = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "seq_length": positions,
        "max_position_embeddings": positions,
        "init_method_std": config.initializer_range,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
    }
    if config.model_type == "gpt2":
        assert config.embd_pdrop == config.resid_pdrop and config.scale_attn_weights is True
        assert not config.scale_attn_by_inverse_layer_idx and not config.add_cross_attention
        return found | {
            "ffn_hidden_size": config.n_inner if config.n_inner is not None else 4 * config.hidden_size,
            "norm_epsilon": config.layer_norm_epsilon,
            "attention_dropout": config.attn_pdrop,
            "hidden_dropout": config.resid_pdrop,
            "no_bias_gelu_fusion": {"gelu": True, "gelu_new": False, "gelu_pytorch_tanh": False}[config.activation_function],
        }
    assert config.hidden_act in ("silu", "swish")
    assert not getattr(config, "use_sliding_window", False)
    assert config.model_type != "mistral" or config.sliding_window is None or config.sliding_window >= positions
    assert set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    return (
        found
        | rotary(config.rope_parameters)
        | {
            "ffn_hidden_size": config.intermediate_size,
            "norm_epsilon": config.rms_norm_eps,
            "attention_dropout": config.attention_dropout,
            "num_query_groups": config.num_key_value_heads,
            "kv_channels": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
            "disable_bias_linear": not (config.model_type == "llama" and config.attention_bias),
        }
    )


def rotary(found: dict[str, Any]) -> dict[str, Any]:
    assert found.get("partial_rotary_factor") in (None, 1)
    base = {"rotary_base": found["rope_theta"], "use_rope_scaling": found["rope_type"] == "llama3"}
    if found["rope_type"] == "linear":
        return base | {"rotary_seq_len_interpolation_factor": found["factor"]}
    if found["rope_type"] == "llama3":
        names = SCALING_KEYS[3:]
        return base | {f"rope_scaling_{name}": found[name] for name in names}
    assert found["rope_type"] == "default"
    return base | {"rotary_seq_len_interpolation_factor": 1.0}


def check(config: dict[str, Any], key: str, *, named: tuple[str, ...]) -> None:
    """Fails unless the model is that of transformers, or is refused by one sentence that names the key. named: what stands for the key."""
    model, refusal = attempt(config)
    if model is None:
        assert re.fullmatch(r"config\.json(:| has| lacks) [^;]*; correct it\.", refusal), (config, refusal)
        assert any(name in refusal for name in named), (config, refusal)
    elif key in UNUSED | UNUSED_BY[config["model_type"]]:
        assert model == model_of({name: value for name, value in config.items() if name != key})
    else:
        wanted = expected(theirs(config | WIDER.get(key, {})))
        wanted |= {"init_method_std": config[key]} if key in WIDER else {}
        assert {name: getattr(model, name) for name in wanted} == wanted, config


def attempt(config: dict[str, Any]) -> tuple[ModelConfig | None, str]:
    try:
        return model_of(config), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("kind", list(BASES))
def test_every_setting_is_what_transformers_uses_or_is_refused_by_its_key(kind: str) -> None:
    keys = {*theirs({"model_type": kind}).to_dict(), *MORE_KEYS} - {"vocab_size", "model_type"}
    for key in sorted(keys):
        named = (key, "head_dim") if key in ("hidden_size", "num_attention_heads") else (key,)
        for value in NONSENSE:
            # transformers refuses a whole number where it wants another; to us 1 is 1.0.
            value = float(value) if key in FLOATS and type(value) is int else value
            check(BASES[kind] | {key: value}, key, named=named)


@pytest.mark.parametrize("form, scaling", SCALINGS)
def test_every_setting_of_rotary_scaling_is_what_transformers_uses_or_is_refused_by_its_key(form: str, scaling: dict[str, Any]) -> None:
    for key in (*SCALING_KEYS, "partial_rotary_factor", "full_attention", "mrope_section"):
        for value in (*NONSENSE, "default", "linear", "llama3", "yarn", "dynamic"):
            named = (key, form) if key in ("rope_type", "type") else (key,)  # another kind may lack a setting
            check(BASES["llama"] | {form: scaling | {key: value}}, key, named=named)


@pytest.mark.parametrize("kind", list(BASES))
def test_a_model_with_its_sizes_alone_has_the_other_settings_of_transformers_and_a_size_that_is_missing_is_named(kind: str) -> None:
    check(BASES[kind], "", named=())
    assert attempt(BASES[kind])[0] is not None
    for key in BASES[kind].keys() - {"vocab_size", "sliding_window"}:
        assert attempt({name: value for name, value in BASES[kind].items() if name != key})[1] == f"config.json lacks {key}; correct it."


@pytest.mark.parametrize("kind", list(BASES))
def test_all_settings_that_transformers_saves_are_read_as_the_sizes_alone_are(kind: str) -> None:
    saved = json.loads(theirs(BASES[kind]).to_json_string(use_diff=False))
    assert len(saved) > len(BASES[kind]) + 10
    assert model_of(saved) == model_of(BASES[kind])


@pytest.mark.parametrize("value", [value for value in NONSENSE if value not in (1, 2, 64, 128)])
def test_a_size_of_the_vocabulary_and_a_kind_that_make_no_sense_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"^config\.json: vocab_size must be [^;]*; correct it\.$"):
        setting(settings_of({"vocab_size": value}), "vocab_size", "padded_vocab_size")
    with pytest.raises(UserError, match=r"^config\.json: model_type must be [^;]*; correct it\.$"):
        layout_of_type(settings_of({"model_type": value}))
