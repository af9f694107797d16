"""From the arguments that Megatron stores with a checkpoint to the flags of this model.

Megatron stores every argument of its run. Those that change what the weights compute are in the tables here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from megatron_zpp.config.flag import Flag, FlagError, check_value, in_words, spelling_of
from megatron_zpp.config.groups.model import NORMALIZATIONS, POSITION_EMBEDDING_TYPES
from megatron_zpp.config.rules_model import check_resolved
from megatron_zpp.config.schema import Config, ModelConfig
from megatron_zpp.system.user_error import UserError

# Our fields, each with Megatron's names for it, the newest first, and its default there.
REQUIRED_COUNTS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
NUMBERS = {
    "rotary_base": ("rotary_base", "rotary_position_embeddings_theta"),
    "rotary_percent": ("rotary_percent",),
    "rotary_seq_len_interpolation_factor": ("rotary_seq_len_interpolation_factor",),
    "rope_scaling_factor": ("rope_scaling_factor",),
    "norm_epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "init_method_std": ("init_method_std",),
    "attention_dropout": ("attention_dropout",),
    "hidden_dropout": ("hidden_dropout",),
}
SWITCHES = (
    "rotary_interleaved",
    "use_rope_scaling",
    "qk_layernorm",
    "swiglu",
    "squared_relu",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "openai_gelu",
)
# Arguments of models that this one does not compute, with the values that leave its function as it is.
WITHOUT_CHANGE: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0, 1, [1]),
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (None, 0),
    "apply_residual_connection_post_layernorm": (False, None),
    "apply_residual_connection_post_norm": (False, None),
    "embed_layernorm": (False, None),
    "embedding_layernorm": (False, None),
    "glu_activation": (None,),
    "quick_geglu": (False, None),
    "glu_linear_offset": (0, None),
    "activation_func_clamp_value": (None,),
    "window_size": (None,),
    "softmax_type": ("vanilla", None),
    "softmax_scale": (None,),
    "use_mup": (False, None),
    "attention_output_gate": (False, None),
    "qk_l2_norm": (False, None),
    "no_rope_freq": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "is_hybrid_model": (False, None),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "linear_attention_freq": (None,),
    "experimental_attention_variant": (None,),
    "bert_binary_head": (True, False, None),
}
SHOWN_CHARACTERS = 80
DEFAULTS: Mapping[str, Any] = {member.name: member.default for member in fields(ModelConfig)}


def model_of(arguments: Mapping[str, Any], place: str) -> ModelConfig:
    """The model that the arguments describe. place: the checkpoint, for messages.

    Raises UserError, naming the argument, for a model that this one does not compute and for an argument that is missing.
    """
    found = _Arguments(arguments, place)
    for name, harmless in WITHOUT_CHANGE.items():
        if arguments.get(name, harmless[0]) not in harmless:
            found.refuse(name, "which this model does not compute; such a model cannot be imported")
    values: dict[str, Any] = {name: found.count(name) for name in REQUIRED_COUNTS}
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    values["kv_channels"] = found.count("kv_channels", hidden // heads)
    values["ffn_hidden_size"] = found.count("ffn_hidden_size", 4 * hidden)
    values["num_query_groups"] = _groups(found, heads)
    values["max_position_embeddings"] = found.count("max_position_embeddings", values["seq_length"])
    values["make_vocab_size_divisible_by"] = found.count("make_vocab_size_divisible_by", DEFAULTS["make_vocab_size_divisible_by"])
    values["position_embedding_type"] = _positions(found)
    values["normalization"] = _normalization(found)
    values |= {name: found.number(DEFAULTS[name], *names) for name, names in NUMBERS.items()}
    values |= {name: found.switch(name, False) for name in SWITCHES}
    values["apply_layernorm_1p"] = found.switch("layernorm_zero_centered_gamma", found.switch("apply_layernorm_1p", False))
    values["disable_bias_linear"] = not found.switch("add_bias_linear", not found.switch("disable_bias_linear", False))
    has_gelu = not (values["swiglu"] or values["squared_relu"] or values["openai_gelu"])
    values["no_bias_gelu_fusion"] = has_gelu and not values["disable_bias_linear"] and not found.switch("bias_gelu_fusion", True)
    return _checked(ModelConfig(**values), place)


def _checked(model: ModelConfig, place: str) -> ModelConfig:
    """The same model, if its flags allow its values."""
    try:
        for member in fields(ModelConfig):
            declared: Flag = member.metadata["flag"]
            value = getattr(model, member.name)
            if value is not None:
                check_value(spelling_of(member.name), value, declared.allowed)
        check_resolved(Config(model=model))
    except FlagError as error:
        raise UserError(f"{place}: its arguments describe a model that cannot be: {error}") from None
    return model


def flags_in_words(model: ModelConfig) -> str:
    """The flags that choose this model, as a user would type them. Flags at their defaults are left out."""
    chosen = {name: value for name, value in vars(model).items() if value is not None and value != DEFAULTS[name]}
    return " ".join(in_words(name, value) for name, value in chosen.items())


class _Arguments:
    """The arguments of a run, each checked when it is taken."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = values
        self._place = place

    def refuse(self, name: str, finding: str) -> NoReturn:
        value = self.values.get(name)
        shown = f" {value}" if isinstance(value, bool | int | float | str) and len(str(value)) < SHOWN_CHARACTERS else ""
        raise UserError(f"{self._place}: its arguments have {name}{shown}, {finding}.")

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number. An argument that is missing or None is the default."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            self.refuse(name, "where a whole number from 1 is needed")
        return value

    def number(self, default: float, *names: str) -> float:
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if type(value) not in (int, float):
                    self.refuse(name, "where a number is needed")
                return float(value)
        return default

    def switch(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, "where True or False is needed")
        return value

    def word(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not str:
            self.refuse(name, "where a word is needed")
        return value


def _groups(found: _Arguments, heads: int) -> int:
    """Key and value heads. Megatron-LM heeds their number only with another argument, and stores 1 without it."""
    if found.switch("group_query_attention", False):
        return found.count("num_query_groups", 1)
    return found.count("num_key_value_heads", heads)


def _positions(found: _Arguments) -> str:
    kind = "rope" if found.switch("use_rotary_position_embeddings", False) else found.word("position_embedding_type", "learned_absolute")
    if kind == "learned_absolute" and not found.switch("add_position_embedding", True):
        return "none"
    if kind not in POSITION_EMBEDDING_TYPES:
        found.refuse("position_embedding_type", "which this model does not compute; such a model cannot be imported")
    return kind


def _normalization(found: _Arguments) -> str:
    """Megatron-DeepSpeed spells the names with small letters."""
    word = found.word("normalization", "LayerNorm")
    by_lower_case = {name.lower(): name for name in NORMALIZATIONS}
    if word.lower() not in by_lower_case:
        found.refuse("normalization", f"which is none of {', '.join(NORMALIZATIONS)}; such a model cannot be imported")
    return by_lower_case[word.lower()]
