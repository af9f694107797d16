"""Reads a model folder of Hugging Face: config.json, and safetensors in one file or in shards with an index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_zpp.checkpoint.hf.layouts import layout_of_type
from megatron_zpp.checkpoint.hf.rules import HEAD
from megatron_zpp.config.outside import Members, OutsideFile, open_regular

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
READ_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Members of config.json that the layouts read, by kind.
COUNT_KEYS = frozenset(
    """
    hidden_size intermediate_size head_dim max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads vocab_size
    sliding_window n_embd n_head n_inner n_layer n_positions
    """.split()
)
NUMBER_KEYS = frozenset(
    """
    attention_dropout attn_pdrop initializer_range layer_norm_epsilon resid_pdrop rms_norm_eps rope_theta
    factor high_freq_factor low_freq_factor original_max_position_embeddings
    """.split()
)
SWITCH_KEYS = frozenset("attention_bias mlp_bias tie_word_embeddings use_sliding_window".split())
SCALING_KEYS = frozenset({"rope_parameters", "rope_scaling"})


class HfFolder:
    """The tensors of the folder, read one at a time.

    Raises ValueError for an unknown kind of model, for a folder without safetensors, and for files that do not fit together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_config(folder / "config.json")
        self.layout = layout_of_type(self.config)
        self._file_of = self._read_places()

    def check_names(self, names: Sequence[str]) -> None:
        """Raises ValueError unless the folder has exactly the tensors of these names, apart from buffers and the copy of a tied head."""
        missing = [name for name in names if self._stored(name) not in self._file_of]
        if missing:
            raise ValueError(f"{self.folder} has no tensor {missing[0]}, which its config.json requires.")
        wanted = {self._stored(name) for name in names}
        left = [name for name in self._file_of.keys() - wanted if not name.endswith(self.layout.ignored) and name != HEAD]
        if left:
            raise ValueError(f"{self.folder} has tensors that its config.json does not describe: {', '.join(sorted(left)[:5])}.")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name in fp32. Raises ValueError if it has another shape or dtype than is read."""
        stored = self._stored(name)
        path = self.folder / self._file_of[stored]
        check_regular(path)
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}).") from error
        if tensor.shape != shape:
            raise ValueError(f"{stored} in {path} has shape {tuple(tensor.shape)}, config.json says {shape}.")
        if tensor.dtype not in READ_DTYPES:
            raise ValueError(f"{stored} in {path} is in {tensor.dtype}; save the model in fp16, bf16 or fp32 to import it.")
        return tensor.float()

    def _stored(self, name: str) -> str:
        """The name in the files: without the prefix if the model was saved without its head."""
        return name if name in self._file_of else name.removeprefix(self.layout.prefix)

    def _read_places(self) -> dict[str, str]:
        if (self.folder / INDEX_FILE).exists():
            places = _read_json(self.folder / INDEX_FILE).members("weight_map")
            for name in places.values:
                if places.text(name) != Path(places.text(name)).name:
                    places.refuse(name, "the name of a file in the folder")
            return dict(places.values)
        path = self.folder / SINGLE_FILE
        if not path.exists():
            raise ValueError(
                f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; pickled files (.bin) are never opened, save the model as "
                "safetensors first."
            )
        check_regular(path)
        try:
            with safe_open(path, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}).") from error


def _read_json(path: Path) -> Members:
    # Members that are not used here may be numbers of any kind.
    return OutsideFile(path, str(path), "copy it again.").members(has_any_numbers=True)


def _read_config(path: Path) -> dict[str, Any]:
    """The object in config.json, whose members that are read here have the kinds that they should. None stands for a default."""
    found = _read_json(path)
    config = {key: value for key, value in found.values.items() if value is not None}
    for key in config:
        if key in COUNT_KEYS:
            found.positive_count(key)
        elif key in NUMBER_KEYS:
            found.number(key)
        elif key in SWITCH_KEYS:
            found.switch(key)
        elif key in SCALING_KEYS:
            _check_scaling(found.members(key))
    return dict(found.values)


def _check_scaling(scaling: Members) -> None:
    for key in NUMBER_KEYS & scaling.values.keys():
        if scaling.values[key] is not None:
            scaling.number(key)


def check_regular(path: Path) -> None:
    """Raises ValueError for a file that is missing, or that is not a regular file: the library that reads tensors would wait for a pipe."""
    try:
        os.close(open_regular(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); copy it again.") from None
