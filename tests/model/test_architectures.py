"""Compares every architecture with its formulas in fp64, and with the implementations of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, LLAMA, VOCAB, loss_and_gradients, sample_batch, small_config, small_gpt
from harness.written_out import loss_by_hand
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT

if TYPE_CHECKING:
    import transformers  # takes a second, and every worker imports this file

LENGTH = 48
ROPE_SCALING = {
    "use_rope_scaling": True,
    "rope_scaling_factor": 8.0,
    "rope_scaling_low_freq_factor": 1.5,
    "rope_scaling_high_freq_factor": 5.0,
    # Of the waves of 6, 20, 63, ... tokens, the first does not change, two are stretched partly, and the others fully.
    "rope_scaling_original_max_position_embeddings": 96,
}


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_loss_and_gradients_equal_the_model_written_out_in_fp64(architecture: str) -> None:
    model = small_gpt(**ARCHITECTURES[architecture])
    loss_BS, gradients = loss_and_gradients(model)
    parameters = {name: parameter.detach().double().requires_grad_() for name, parameter in model.named_parameters()}
    expected_BS = torch.stack([loss_by_hand(parameters, model.config, *sample) for sample in zip(*sample_batch(), strict=True)])
    (expected_BS * torch.linspace(0.5, 1.5, expected_BS.numel()).view(expected_BS.shape)).sum().backward()

    # fp32 against fp64: a few hundred roundings of 6e-8 on values of order 1 to 10.
    torch.testing.assert_close(loss_BS.double(), expected_BS.detach(), rtol=1e-5, atol=1e-5)
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        expected = parameters[name].grad
        assert expected is not None
        # Without rotation the bias of keys has the gradient 0, because it shifts all scores of a query by the same amount.
        assert (gradient - expected).norm() <= 1e-5 * expected.norm().clamp(min=0.1), name


def test_no_two_architectures_are_the_same_function() -> None:
    losses = [float(loss_and_gradients(small_gpt(**changes))[0].sum()) for changes in ARCHITECTURES.values()]
    assert len(set(losses)) == len(ARCHITECTURES)


def llama_config(**changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 48, "kv_channels": 16, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 80}
    return small_config(**LLAMA | sizes | {"seq_length": LENGTH, "norm_epsilon": 1e-6} | changes)


def their_sizes(config: ModelConfig) -> dict[str, Any]:
    """The arguments that LlamaConfig and its descendants have in common."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.key_value_heads,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "attn_implementation": "eager",
    }


def llama(config: ModelConfig) -> transformers.PreTrainedModel:
    import transformers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.use_rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
        }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**their_sizes(config), head_dim=config.kv_channels, rope_parameters=rope))


def qwen2(config: ModelConfig) -> transformers.PreTrainedModel:
    import transformers

    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**their_sizes(config), rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base})
    )


def qwen3(config: ModelConfig) -> transformers.PreTrainedModel:
    import transformers

    rope = {"rope_type": "default", "rope_theta": config.rotary_base}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**their_sizes(config), head_dim=config.kv_channels, rope_parameters=rope))


def gpt2(config: ModelConfig) -> transformers.PreTrainedModel:
    import transformers

    theirs = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=config.max_position_embeddings,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_attention_heads,
        n_inner=config.ffn_hidden_size,
        layer_norm_epsilon=config.norm_epsilon,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(theirs)


def llama_names(config: ModelConfig, of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Our tensors `of` a name, under the names of Llama and its descendants."""
    found = {"model.embed_tokens.weight": of("embedding.word.weight"), "model.norm.weight": of("final.norm.weight")}
    if config.untie_embeddings_and_output_weights:
        found["lm_head.weight"] = of("final.head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        found[f"{theirs}.input_layernorm.weight"] = of(f"{ours}.attention_norm.weight")
        found[f"{theirs}.post_attention_layernorm.weight"] = of(f"{ours}.mlp_norm.weight")
        for part in ["weight", "bias"] if config.add_qkv_bias else ["weight"]:
            for kind, rows in zip("qkv", by_kind(of(f"{ours}.attention.qkv.{part}"), config), strict=True):
                found[f"{theirs}.self_attn.{kind}_proj.{part}"] = rows
        if config.qk_layernorm:
            found[f"{theirs}.self_attn.q_norm.weight"] = of(f"{ours}.attention.query_norm.weight")
            found[f"{theirs}.self_attn.k_norm.weight"] = of(f"{ours}.attention.key_norm.weight")
        found[f"{theirs}.self_attn.o_proj.weight"] = of(f"{ours}.attention.projection.weight")
        gate, value = of(f"{ours}.mlp.up.weight").split(config.ffn_hidden_size)
        found |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": value}
        found[f"{theirs}.mlp.down_proj.weight"] = of(f"{ours}.mlp.down.weight")
    return found


def gpt2_names(config: ModelConfig, of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Our tensors under GPT-2's names; its linear layers are stored transposed."""
    found = {"transformer.wte.weight": of("embedding.word.weight"), "transformer.wpe.weight": of("embedding.position.weight")}
    for part in ("weight", "bias"):
        found[f"transformer.ln_f.{part}"] = of(f"final.norm.{part}")
        for i in range(config.num_layers):
            ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
            found[f"{theirs}.ln_1.{part}"] = of(f"{ours}.attention_norm.{part}")
            found[f"{theirs}.ln_2.{part}"] = of(f"{ours}.mlp_norm.{part}")
            found[f"{theirs}.attn.c_attn.{part}"] = torch.cat(by_kind(of(f"{ours}.attention.qkv.{part}"), config)).t()
            found[f"{theirs}.attn.c_proj.{part}"] = of(f"{ours}.attention.projection.{part}").t()
            found[f"{theirs}.mlp.c_fc.{part}"] = of(f"{ours}.mlp.up.{part}").t()
            found[f"{theirs}.mlp.c_proj.{part}"] = of(f"{ours}.mlp.down.{part}").t()
    return found


def by_kind(rows: Tensor, config: ModelConfig) -> list[Tensor]:
    """The rows of all queries, of all keys and of all values."""
    shared = config.num_attention_heads // config.key_value_heads
    heads = rows.split(config.kv_channels)
    of_group = [heads[start : start + shared + 2] for start in range(0, len(heads), shared + 2)]
    queries = [query for group in of_group for query in group[:shared]]
    return [torch.cat(queries), torch.cat([group[shared] for group in of_group]), torch.cat([group[shared + 1] for group in of_group])]


THEIRS: dict[str, tuple[ModelConfig, Callable[[ModelConfig], transformers.PreTrainedModel], Callable[..., dict[str, Tensor]]]] = {
    "GPT-2": (small_config(kv_channels=8, seq_length=LENGTH, max_position_embeddings=LENGTH), gpt2, gpt2_names),
    "Llama 2": (llama_config(num_query_groups=4), llama, llama_names),
    "Llama 3 with scaling": (llama_config(rotary_base=500.0, **ROPE_SCALING), llama, llama_names),
    "Llama 3 with one key head": (llama_config(num_query_groups=1, untie_embeddings_and_output_weights=False), llama, llama_names),
    "Qwen2": (llama_config(kv_channels=12, add_qkv_bias=True, rotary_base=1e6), qwen2, llama_names),
    "Qwen2 tied": (llama_config(kv_channels=12, add_qkv_bias=True, untie_embeddings_and_output_weights=False), qwen2, llama_names),
    "Qwen3": (llama_config(qk_layernorm=True), qwen3, llama_names),
}


@pytest.mark.parametrize("name", list(THEIRS))
def test_logits_and_gradients_equal_those_of_transformers_within_1e_5(name: str) -> None:
    config, build, names = THEIRS[name]
    ours, theirs = small_gpt(**vars(config)), build(config)
    missing = theirs.load_state_dict(names(config, lambda parameter: ours.get_parameter(parameter).detach()), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}  # where it is tied
    tokens_BS, _ = sample_batch(samples=2, length=LENGTH)
    weights_BSV = torch.randn(2, LENGTH, VOCAB, generator=torch.Generator().manual_seed(5))

    our_logits, their_logits = ours(tokens_BS, None, first_sample=0), theirs(tokens_BS).logits
    assert 1 < float(their_logits.detach().abs().max()) < 30
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-5, atol=1e-5)

    for logits in (our_logits, their_logits):
        (logits * weights_BSV).sum().backward()
    for parameter, gradient in names(config, lambda parameter: gradient_of(ours, parameter)).items():
        expected = gradient_of(theirs, parameter)
        assert float((gradient - expected).norm()) <= 1e-5 * float(expected.norm()), parameter


def gradient_of(model: GPT | transformers.PreTrainedModel, parameter: str) -> Tensor:
    gradient = model.get_parameter(parameter).grad
    assert gradient is not None
    return gradient


def test_the_scaling_of_rotary_positions_is_seen_at_this_length() -> None:
    config, _, _ = THEIRS["Llama 3 with scaling"]
    tokens_BS, _ = sample_batch(samples=2, length=LENGTH)
    with torch.no_grad():
        scaled, plain = (small_gpt(**vars(config) | {"use_rope_scaling": on})(tokens_BS, None, first_sample=0) for on in (True, False))
    assert float((scaled - plain).abs().max()) > 0.1
