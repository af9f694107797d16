"""Reads a model folder of Hugging Face: config.json, and safetensors in one file or in shards with an index."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_zpp.checkpoint.hf.layouts import layout_of_type
from megatron_zpp.checkpoint.hf.rules import HEAD, Buffer, HfTensor, compared_rows, largest_difference
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.system.outside import Members, OutsideFile, open_regular
from megatron_zpp.system.user_error import UserError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
READ_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BUFFER_DTYPES = (*READ_DTYPES, torch.bool, torch.uint8)
ADAPTER_FILE = "adapter_config.json"


class HfFolder:
    """The tensors of the folder, read one at a time.

    Raises UserError for an unknown kind of model, for a folder without safetensors, and for files that do not fit together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_json(folder / "config.json", "copy it again, correct it, or choose another model.")
        self.layout = layout_of_type(self.config)
        self._file_of = self._read_places()

    def check_tensors(self, tensors: Sequence[HfTensor], model: ModelConfig) -> None:
        """Raises UserError unless the folder has these tensors, and beside them only what the model has no need of.

        That is a tied head with the values of the embedding, and buffers with the values that config.json gives them.
        """
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        missing = [name for name in shapes if self._stored(name) not in self._file_of]
        if missing:
            raise UserError(f"{self.folder} has no tensor {missing[0]}, which its config.json requires.")
        others = sorted(self._file_of.keys() - {self._stored(name) for name in shapes} - {HEAD})
        buffer_of = {name: buffer for name in others for buffer in self.layout.buffers if name.endswith(buffer.ending)}
        left = [name for name in others if name not in buffer_of]
        if left:
            raise UserError(f"{self.folder} has tensors that its config.json does not describe: {', '.join(left[:5])}.")
        for name, buffer in buffer_of.items():
            self._check_buffer(name, buffer, model)
        if HEAD in self._file_of and HEAD not in shapes:
            self._check_tied_head(shapes[self.layout.embedding])

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name in fp32. Raises UserError if it has another shape or dtype than is read."""
        (whole,) = self._parts(self._stored(name), shape, shape[0])
        return whole

    def _parts(self, stored: str, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
        """The tensor in parts of so many rows, in fp32."""
        path = self._path_of(stored)
        with _opened(path) as file:
            whole = file.get_slice(stored)
            found = tuple(whole.get_shape())
            if found != shape:
                raise UserError(f"{stored} in {path} has shape {found}, config.json says {shape}.")
            for start in range(0, shape[0], rows):
                part: Tensor = whole[start : start + rows]
                if part.dtype not in READ_DTYPES:
                    raise UserError(f"{stored} in {path} is in {part.dtype}; save the model in fp16, bf16 or fp32 to import it.")
                yield part.float()

    def _check_buffer(self, name: str, buffer: Buffer, model: ModelConfig) -> None:
        path = self._path_of(name)
        with _opened(path) as file:
            tensor = file.get_tensor(name)
            if tensor.dtype not in BUFFER_DTYPES or not buffer.holds(model, tensor):
                raise UserError(f"{name} in {path} must be {buffer.rule}; copy the model again, or correct its config.json.")

    def _check_tied_head(self, shape: tuple[int, ...]) -> None:
        """Raises UserError unless the head has the values of the embedding."""
        names = (HEAD, self._stored(self.layout.embedding))
        parts = (self._parts(name, shape, compared_rows(shape)) for name in names)
        largest = largest_difference(zip(*parts, strict=True))
        if largest != 0:
            raise UserError(
                f"{HEAD} in {self._path_of(HEAD)} differs from {names[1]} by up to {largest:g}, and config.json ties them; set "
                "tie_word_embeddings to false in config.json to import both."
            )

    def _path_of(self, stored: str) -> Path:
        return self.folder / self._file_of[stored]

    def _stored(self, name: str) -> str:
        """The name in the files: without the prefix if the model was saved without its head."""
        return name if name in self._file_of else name.removeprefix(self.layout.prefix)

    def _read_places(self) -> dict[str, str]:
        """The file of each tensor. Raises UserError for files of more than one model, and for tensors that the index does not name."""
        if (self.folder / ADAPTER_FILE).exists():
            raise UserError(
                f"{self.folder} holds {ADAPTER_FILE}, and weights without its adapter; merge the adapter into the model and save that, or "
                "delete the file."
            )
        index, single = self.folder / INDEX_FILE, self.folder / SINGLE_FILE
        if not index.exists():
            return dict.fromkeys(self._names_in_single(single), SINGLE_FILE)
        if single.exists():
            raise UserError(f"{self.folder} holds {SINGLE_FILE} and {INDEX_FILE}, which are two models; delete one of them.")
        places = _read_json(index, "copy it again.").members("weight_map")
        for name in places.values:
            if places.text(name) != Path(places.text(name)).name:
                places.refuse(name, "the name of a file in the folder")
        for file in sorted(set(places.values.values())):
            with _opened(self.folder / file) as opened:
                other = set(opened.keys()) ^ {name for name, place in places.values.items() if place == file}
            if other:
                raise UserError(f"only one of {self.folder / file} and {INDEX_FILE} has {min(other)}; copy the model again.")
        return dict(places.values)

    def _names_in_single(self, path: Path) -> list[str]:
        if not path.exists():
            raise UserError(
                f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; pickled files (.bin) are never opened, save the model as "
                "safetensors first."
            )
        with _opened(path) as file:
            return list(file.keys())


def _read_json(path: Path, remedy: str) -> Members:
    # Members that are not used here may be numbers of any kind.
    return OutsideFile(path, str(path), remedy).members(has_any_numbers=True)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file of tensors. Raises UserError if it, or something in it, cannot be read."""
    try:
        os.close(open_regular(path))  # the library that reads tensors would wait for a pipe
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); copy it again.") from None
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from error
