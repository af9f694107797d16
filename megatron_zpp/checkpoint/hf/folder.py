"""Reads a model folder of Hugging Face: config.json, and safetensors in one file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_zpp.checkpoint.hf.layouts import layout_of_type
from megatron_zpp.checkpoint.hf.rules import HEAD

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class HfFolder:
    """The tensors of the folder, read one at a time.

    Raises ValueError for an unknown kind of model, for a folder without safetensors, and for files that do not fit together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_json(folder / "config.json")
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
        """The tensor of this name in fp32. Raises ValueError if it has another shape."""
        stored = self._stored(name)
        path = self.folder / self._file_of[stored]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}).") from error
        if tensor.shape != shape:
            raise ValueError(f"{stored} in {path} has shape {tuple(tensor.shape)}, config.json says {shape}.")
        return tensor.float()

    def _stored(self, name: str) -> str:
        """The name in the files: without the prefix if the model was saved without its head."""
        return name if name in self._file_of else name.removeprefix(self.layout.prefix)

    def _read_places(self) -> dict[str, str]:
        if (self.folder / INDEX_FILE).exists():
            places = _read_json(self.folder / INDEX_FILE).get("weight_map")
            if not isinstance(places, dict) or not all(Path(str(file)).name == file for file in places.values()):
                raise ValueError(f"{self.folder / INDEX_FILE} has no usable weight_map.")
            return places
        path = self.folder / SINGLE_FILE
        if not path.exists():
            raise ValueError(
                f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; pickled files (.bin) are never opened, save the model as "
                "safetensors first."
            )
        try:
            with safe_open(path, framework="pt") as file:
                return dict.fromkeys(file.keys(), SINGLE_FILE)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}).") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        members = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from error
    if not isinstance(members, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return members
