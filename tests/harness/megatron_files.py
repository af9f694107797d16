"""Writes checkpoints of small models as Megatron-LM and Megatron-DeepSpeed lay them out, with torch's own writers.

Nothing here comes from the package's tables of names and orders: both were written after Megatron's sources, independently.
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from harness.small_gpt import small_config
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT, materialize

ROWS = 64
ITERATION, SAMPLES = 7, 448
CORE_LAYER = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_",
    "attention.qkv": "self_attention.linear_qkv.",
    "attention.query_norm": "self_attention.q_layernorm.",
    "attention.key_norm": "self_attention.k_layernorm.",
    "attention.projection": "self_attention.linear_proj.",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
    "mlp.up": "mlp.linear_fc1.",
    "mlp.down": "mlp.linear_fc2.",
}
UNFUSED = {"attention_norm": "input_layernorm.", "mlp_norm": "pre_mlp_layernorm."}
OLD_LAYER = {
    "attention_norm": "input_layernorm.",
    "attention.qkv": "self_attention.query_key_value.",
    "attention.query_norm": "self_attention.q_layernorm.",
    "attention.key_norm": "self_attention.k_layernorm.",
    "attention.projection": "self_attention.dense.",
    "mlp_norm": "post_attention_layernorm.",
    "mlp.up": "mlp.dense_h_to_4h.",
    "mlp.down": "mlp.dense_4h_to_h.",
}


def random_model(dtype: torch.dtype = torch.float32, **changes: Any) -> GPT:
    """A model in which no two weights have the same value by chance. Its values fit into `dtype`."""
    model = materialize(GPT(small_config(**changes), ROWS, 7, torch.float32)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.4).to(dtype))
    return model


def arguments(model: ModelConfig, tensor_ranks: int = 1, **changes: Any) -> Namespace:
    """The arguments of a run of Megatron-LM that trained the model, with some that are no plain values."""
    values: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "kv_channels": model.kv_channels,
        "group_query_attention": model.key_value_heads != model.num_attention_heads,
        "num_query_groups": 1 if model.key_value_heads == model.num_attention_heads else model.key_value_heads,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.max_position_embeddings,
        "position_embedding_type": model.position_embedding_type,
        "rotary_base": int(model.rotary_base),
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": model.rotary_interleaved,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": model.use_rope_scaling,
        "add_position_embedding": True,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.apply_layernorm_1p,
        "qk_layernorm": model.qk_layernorm,
        "swiglu": model.swiglu,
        "squared_relu": model.squared_relu,
        "openai_gelu": False,
        "bias_gelu_fusion": not model.no_bias_gelu_fusion,
        "add_bias_linear": not model.disable_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_method_std,
        "make_vocab_size_divisible_by": 64,
        "padded_vocab_size": ROWS,
        "tensor_model_parallel_size": tensor_ranks,
        "consumed_train_samples": SAMPLES,
        "num_experts": None,
        "params_dtype": torch.bfloat16,
        "data_path": ["a", "b"],
        "tensorboard_dir": Path("logs"),
    }
    return Namespace(**values | changes)


def core_names(model: GPT, *, is_fused: bool = True) -> dict[str, Tensor]:
    """The whole parameters by the names of Megatron core, with or without Transformer Engine's fused norms."""
    layer = CORE_LAYER if is_fused else CORE_LAYER | UNFUSED
    outside = {
        "embedding.word": "embedding.word_embeddings.",
        "embedding.position": "embedding.position_embeddings.",
        "final.norm": "decoder.final_layernorm.",
        "final.head": "output_layer.",
    }
    return _named(model, outside, "decoder.layers", layer)


def old_names(model: GPT) -> dict[str, Tensor]:
    """The whole parameters by the names of Megatron-LM before its core, and of Megatron-DeepSpeed."""
    outside = {
        "embedding.word": "language_model.embedding.word_embeddings.",
        "embedding.position": "language_model.embedding.position_embeddings.",
        "final.norm": "language_model.encoder.final_layernorm.",
        "final.head": "language_model.output_layer.",
    }
    return _named(model, outside, "language_model.encoder.layers", OLD_LAYER)


def _named(model: GPT, outside: Mapping[str, str], layers: str, layer: Mapping[str, str]) -> dict[str, Tensor]:
    named = {}
    for name, value in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module.startswith("blocks."):
            _, number, inside = module.split(".", 2)
            named[f"{layers}.{number}.{layer[inside]}{kind}"] = value
        else:
            named[f"{outside[module]}{kind}"] = value
    return named


def part(name: str, whole: Tensor, rank: int, ranks: int, *, is_gated: bool) -> Tensor:
    """What a tensor rank of Megatron has of a parameter, by its name there."""
    if name.endswith(("linear_fc1.weight", "linear_fc1.bias", "dense_h_to_4h.weight", "dense_h_to_4h.bias")) and is_gated:
        gate, value = whole.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], value.chunk(ranks)[rank]])
    if "linear_fc1.layer_norm" in name or "linear_qkv.layer_norm" in name:
        return whole
    if any(word in name for word in ("word_embeddings", "output_layer", "linear_qkv", "query_key_value", "linear_fc1", "dense_h_to_4h")):
        return whole.chunk(ranks)[rank]
    is_row_parallel = any(word in name for word in ("linear_proj", "self_attention.dense", "linear_fc2", "dense_4h_to_h"))
    return whole.chunk(ranks, dim=1)[rank].contiguous() if is_row_parallel and whole.dim() == 2 else whole


def nested(named: Mapping[str, Tensor]) -> OrderedDict[str, Any]:
    """Megatron-LM's dictionaries before its core: of the parts of the language model, with the names of their tensors."""
    model: OrderedDict[str, Any] = OrderedDict(language_model=OrderedDict())
    for name, value in named.items():
        _, part_name, rest = name.split(".", 2)
        place = model["language_model"].setdefault(part_name, OrderedDict())
        if part_name == "embedding":
            table, _, rest = rest.partition(".")
            place = place.setdefault(table, OrderedDict())
        place[rest] = value
    return model


def with_versions(named: Mapping[str, Tensor]) -> OrderedDict[str, Any]:
    """The tensors as a module of torch gives them: the dictionary has an attribute with the versions of the modules."""
    state = OrderedDict[str, Any](named)
    vars(state)["_metadata"] = OrderedDict({"": {"version": 1}, "output_layer": {"version": 1}})
    return state


def write_legacy(
    folder: Path,
    model: GPT,
    ranks: int = 1,
    *,
    names: Callable[[GPT], dict[str, Tensor]] = core_names,
    dtype: torch.dtype = torch.float32,
    version: float | None = 3.0,
    order: Callable[[Tensor], Tensor] = lambda rows: rows,
    changes: Mapping[str, Any] | None = None,
    **saving: Any,
) -> Path:
    """The format `torch` without pipeline ranks.

    order: of the rows of q, k and v within a rank. changes: of arguments. saving: options of torch.save.
    """
    gated = model.config.swiglu
    for rank in range(ranks):
        named = {name: part(name, value, rank, ranks, is_gated=gated).to(dtype) for name, value in names(model).items()}
        named = {name: order(value) if "query_key_value" in name else value for name, value in named.items()}
        saved: dict[str, Any] = {
            "args": arguments(model.config, ranks, **(changes or {})),
            "checkpoint_version": version,
            "iteration": ITERATION,
            "model": nested(named) if "language_model.embedding.word_embeddings.weight" in named else with_versions(named),
            "rng_state": [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.arange(5, dtype=torch.uint8)}],
        }
        if version is None:
            del saved["checkpoint_version"]
        else:
            saved["model"]["decoder.layers.0.self_attention.core_attention._extra_state"] = None
        path = folder / f"iter_{ITERATION:07d}" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(saved, path, **saving)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return folder


def write_pipeline(folder: Path, model: GPT, stages: int = 2, virtual_stages: int = 2) -> Path:
    """The format `torch` with virtual stages: a pipeline rank has several models, whose layers count from 0. The last has a tied head."""
    per_model = model.config.num_layers // stages // virtual_stages
    for stage in range(stages):
        saved: dict[str, Any] = {"args": arguments(model.config), "checkpoint_version": 3.0, "iteration": ITERATION}
        for number in range(virtual_stages):
            first = (number * stages + stage) * per_model
            part_of_model = OrderedDict[str, Tensor]()
            for name, value in core_names(model).items():
                words = name.split(".")
                if words[:2] == ["decoder", "layers"]:
                    if first <= int(words[2]) < first + per_model:
                        part_of_model[".".join([*words[:2], str(int(words[2]) - first), *words[3:]])] = value
                elif (words[0] == "embedding" and first == 0) or (words[0] == "decoder" and first + per_model == model.config.num_layers):
                    part_of_model[name] = value
            if first + per_model == model.config.num_layers:
                part_of_model["output_layer.weight"] = model.embedding.word.weight
            saved[f"model{number}"] = part_of_model
        path = folder / f"iter_{ITERATION:07d}" / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(saved, path)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return folder


class Chunks(Tensor):
    """A tensor that torch.distributed.checkpoint writes in chunks, as Megatron core hands it over."""

    _chunks: Mapping[tuple[int, ...], Tensor]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        whole = self.as_subclass(Tensor)
        properties = TensorProperties.create_from_tensor(whole)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), chunk.shape), properties=properties, size=whole.shape
                ),
            )
            for offsets, chunk in self._chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), chunk.shape) for offsets, chunk in self._chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._chunks[tuple(index.offset or ())]


def write_torch_dist(
    folder: Path,
    model: GPT,
    ranks: int = 1,
    *,
    is_stacked: bool = True,
    has_common_file: bool = True,
    dtype: torch.dtype = torch.float32,
    with_main_weights: bool = False,
) -> Path:
    """The format `torch_dist`. is_stacked: layers are a dimension of a tensor. with_main_weights: of the optimizer, in fp32."""
    named = core_names(model)
    gated = model.config.swiglu
    state: dict[str, Any] = {}
    for name, whole in _stacked(named).items() if is_stacked else named.items():
        state[name] = _chunked(name, whole.to(dtype), ranks, has_layers=is_stacked and ".layers." in name, is_gated=gated)
        if with_main_weights:
            main = f"chained_0.optimizer.state.fp32_param.{name}"
            state[main] = _chunked(name, whole, ranks, has_layers=is_stacked and ".layers." in name, is_gated=gated)
            state[main.replace("fp32_param", "exp_avg")] = torch.zeros(3)
    state["decoder.layers.self_attention.core_attention._extra_state/shard_0_2"] = [b""]
    common = {
        "args": arguments(model.config, ranks),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "opt_param_scheduler": {"max_lr": 1.0},
    }
    path = folder / f"iter_{ITERATION:07d}"
    path.mkdir(parents=True)
    if has_common_file:
        torch.save(common, path / "common.pt")
    else:
        state["common_state/shard_0_1"] = [common]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that there is one process
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2), planner=planner)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return folder


def _stacked(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for name, value in named.items():
        words = name.split(".")
        found.setdefault(".".join(word for word in words if not word.isdigit()), []).append(value)
    return {name: torch.stack(values) if ".layers." in name else values[0] for name, values in found.items()}


def _chunked(name: str, whole: Tensor, ranks: int, *, has_layers: bool, is_gated: bool) -> Chunks:
    """The chunks of every tensor rank: of a gated up layer two, the gate and the value."""
    chunks: dict[tuple[int, ...], Tensor] = {}
    for layer in range(len(whole)) if has_layers else (None,):
        value, first = (whole, ()) if layer is None else (whole[layer], (layer,))
        one = part(name, value, 0, ranks, is_gated=False)
        dim = next((dim for dim in range(value.dim()) if one.shape[dim] != value.shape[dim]), 0)
        count = value.shape[dim] // one.shape[dim]
        count *= 2 if is_gated and "linear_fc1." in name and "layer_norm" not in name else 1
        for index, chunk in enumerate(value.chunk(count, dim)):
            offsets = [0] * value.dim()
            offsets[dim] = index * chunk.shape[dim]
            chunks[(*first, *offsets)] = (chunk if layer is None else chunk[None]).contiguous()
    found = whole.as_subclass(Chunks)
    found._chunks = chunks
    return found


def deepspeed_state(model: GPT, ranks: int, **more: Any) -> dict[str, Any]:
    """What every file of model states of DeepSpeed has."""
    found = arguments(model.config, ranks)
    found.num_key_value_heads = model.config.key_value_heads
    found.normalization = found.normalization.lower()
    found.layernorm_epsilon, found.num_experts = found.norm_epsilon, [1]
    found.use_rotary_position_embeddings = found.position_embedding_type == "rope"
    for name in ("group_query_attention", "num_query_groups", "norm_epsilon", "position_embedding_type"):
        delattr(found, name)
    return {"args": found, "checkpoint_version": 3.0, "iteration": ITERATION, "ds_version": "0.16.0", **more}


def write_deepspeed(
    folder: Path,
    model: GPT,
    ranks: int = 1,
    *,
    kind: str = "whole",
    dtype: torch.dtype = torch.float32,
    data_ranks: int = 3,
    stage_by_name: bool = False,
) -> Path:
    """A checkpoint of Megatron-DeepSpeed. kind: whole (ZeRO stages 0 to 2), pipeline or stage 3.

    stage_by_name: stage 3 is pickled as Python 3.11.0 to 3.11.3 pickle a member of an enumeration, otherwise as others do.
    """
    tag = folder / f"global_step{ITERATION}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    for rank in range(ranks):
        named = {name: part(name, value, rank, ranks, is_gated=model.config.swiglu) for name, value in old_names(model).items()}
        if kind == "stage 3":
            _write_stage_3(tag, named, rank, data_ranks, deepspeed_state(model, ranks), stage_by_name)
            continue
        stored = {name: value.to(dtype) for name, value in named.items()}
        module = nested(stored) if kind == "whole" else None
        torch.save(deepspeed_state(model, ranks, module=module), tag / f"mp_rank_{rank:02d}_model_states.pt")
        if kind == "pipeline":
            _write_pipeline(tag, stored, rank, model)
    return folder


def _write_pipeline(tag: Path, named: Mapping[str, Tensor], rank: int, model: GPT) -> None:
    """The layers from 1 on; layer 0 converts types. A tied head is a second embedding."""
    inside = "language_model.encoder."
    embedding = {f"{name.split('.')[2]}.weight": value for name, value in named.items() if ".embedding." in name}
    layers = [embedding]
    for number in range(model.config.num_layers):
        start = f"{inside}layers.{number}."
        layers.append({name.removeprefix(start): value for name, value in named.items() if name.startswith(start)})
    start = f"{inside}final_layernorm."
    layers.append({name.removeprefix(start): value for name, value in named.items() if name.startswith(start)})
    head = named.get("language_model.output_layer.weight")
    layers.append(embedding if head is None else {"lm_head.weight": head})
    for number, layer in enumerate(layers, 1):
        torch.save(OrderedDict(layer), tag / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")


def _write_stage_3(
    tag: Path, named: Mapping[str, Tensor], rank: int, data_ranks: int, state: Mapping[str, Any], stage_by_name: bool
) -> None:
    """Each data rank has an equal part of every parameter, the last ones padded, in two groups of different lengths.

    As DeepSpeed 0.19.8 writes them: the stage is a member of an enumeration, and the flat groups have an attribute.
    """
    shapes = [OrderedDict((f"module.{name}", value.shape) for name, value in named.items())]
    for data_rank in range(data_ranks):
        parts = []
        for value in named.values():
            length = -(-value.numel() // data_ranks)
            padded = torch.nn.functional.pad(value.flatten(), (0, length * data_ranks - value.numel()), value=9.0)
            parts.append(padded[data_rank * length : (data_rank + 1) * length])
        flat = torch.cat(parts)
        groups = [flat[:100].clone(), flat[100:].clone()]
        for number, group in enumerate(groups):
            group.ds_id = f"{number}_0"  # type: ignore[attr-defined]
        name = f"zero_pp_rank_{data_rank}_mp_rank_{rank:02d}"
        torch.save({**state, "module": None, "param_shapes": shapes}, tag / f"{name}_model_states.pt")
        with zero_stage_3(stage_by_name) as stage:
            optimizer = {"zero_stage": stage, "partition_count": data_ranks, "fp32_flat_groups": groups}
            torch.save({"optimizer_state_dict": optimizer, "ds_config": {}}, tag / f"bf16_{name}_optim_states.pt")


@contextmanager
def zero_stage_3(by_name: bool) -> Iterator[IntEnum]:
    """A member of a class of the name that DeepSpeed's stages have in a pickle."""
    place = "deepspeed.runtime.zero.config"
    kind = IntEnum("ZeroStageEnum", {"weights": 3}, module=place)
    # Set, because Python's own way depends on its version.
    reduced = (getattr, (kind, "weights")) if by_name else (kind, (3,))
    kind.__reduce_ex__ = lambda stage, protocol: reduced  # type: ignore[method-assign]
    parts = place.split(".")
    modules = {name: ModuleType(name) for name in (".".join(parts[: length + 1]) for length in range(len(parts)))}
    modules[place].ZeroStageEnum = kind  # type: ignore[attr-defined]
    with patch.dict(sys.modules, modules):
        yield kind(3)
