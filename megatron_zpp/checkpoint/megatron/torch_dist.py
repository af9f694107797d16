"""Reads the format `torch_dist` of Megatron core: .metadata, and files __N_M.distcp with chunks of tensors.

.metadata says which chunks a tensor has, and where each is. A tensor of all layers has one dimension more, the first. Other objects are
bytes of torch.save; common_state, before 2026 the file common.pt, has the arguments of the run. With a distributed optimizer that saves
under the names of parameters, the fp32 weights are there too, and they are taken for the parameters that have them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_zpp.checkpoint.megatron.chunks import Chunk, ChunkedTensor, FileRange
from megatron_zpp.checkpoint.megatron.legacy import version_of
from megatron_zpp.checkpoint.megatron.names import FREQUENCIES, is_of_all_layers
from megatron_zpp.checkpoint.megatron.pickled import Dictionary, PickleError, members_of, read_pickle
from megatron_zpp.checkpoint.megatron.rank_file import MOST_NAMES
from megatron_zpp.checkpoint.megatron.source import MAIN_WEIGHTS, MODEL_WEIGHTS, SHOWN_NAMES, Source, StoredTensor, named_here, number_of
from megatron_zpp.checkpoint.megatron.torch_file import TorchFile, counts_of
from megatron_zpp.checkpoint.megatron.window import Window
from megatron_zpp.checkpoint.other_programs import METADATA_FILE
from megatron_zpp.system.user_error import UserError

COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
MOST_METADATA_BYTES = 1 << 32
_OPTIMIZER = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.")
_MAIN_WEIGHT = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.state\.fp32_param\.")


def read_torch_dist(folder: Path) -> Source:
    """The checkpoint in the folder. Raises UserError if files are missing or cannot be used."""
    metadata = _Metadata(folder)
    common = members_of(_common(folder, metadata))
    if "args" not in common:
        raise UserError(f"{folder} has no arguments of a run of Megatron-LM; choose a checkpoint that it has written.")
    found = dict(metadata.tensors())
    weights = named_here(((name, tensor) for name, tensor in found.items() if not _OPTIMIZER.match(name)), str(folder))
    stored_main = ((_MAIN_WEIGHT.sub("", name), tensor) for name, tensor in found.items() if _MAIN_WEIGHT.match(name))
    main_weights = named_here(stored_main, str(folder))
    main = {name: tensor for name, tensor in main_weights.items() if name in weights and weights[name].shape == tensor.shape}
    return Source(
        "Megatron core, torch_dist",
        members_of(common["args"]),
        number_of(common.get("iteration")),
        version_of(common),
        ({**weights, **main},),
        (_remark(main, sorted(weights.keys() - main.keys() - {FREQUENCIES})),),
    )


def _remark(main: Mapping[str, StoredTensor], others: Sequence[str]) -> str:
    """What the weights are. others: parameters without fp32 weights of the optimizer, such as frozen ones."""
    if not main:
        return MODEL_WEIGHTS
    return f"{MAIN_WEIGHTS}, but not of {', '.join(others[:SHOWN_NAMES])}, which it does not have" if others else MAIN_WEIGHTS


class _Metadata:
    """.metadata of a folder: which tensors there are, and where their chunks are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        window = Window(folder / METADATA_FILE)
        if window.nbytes > MOST_METADATA_BYTES:
            self.refuse(f"has {window.nbytes} bytes, more than {MOST_METADATA_BYTES}")
        try:
            members = members_of(read_pickle(io.BytesIO(window.read_at(0, window.nbytes))).root)
        except PickleError as error:
            self.refuse(str(error))
        self._described = members_of(members.get("state_dict_metadata"))
        self._places: dict[tuple[str, tuple[int, ...] | None], FileRange] = {}
        stored = members.get("storage_data")
        for index, info in stored.pairs if isinstance(stored, Dictionary) else ():
            name, offsets = (members_of(index).get(key) for key in ("fqn", "offset"))
            if type(name) is str:
                self._places[name, counts_of(offsets)] = self._range(members_of(info))

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Every tensor of numbers by its name; one of all layers as one tensor for each."""
        count = 0
        for name, record in self._described.items():
            members = members_of(record)
            if "size" not in members:
                continue  # bytes of an object
            shape, chunks = counts_of(members["size"]), members.get("chunks")
            if shape is None or not isinstance(chunks, list):
                self.refuse(f"describes {name} without its shape")
            tensor = ChunkedTensor(self.folder, name, shape, [self._chunk(name, members_of(chunk)) for chunk in chunks])
            for found in self._layers(tensor):
                count += 1
                if count > MOST_NAMES:
                    self.refuse(f"describes more than {MOST_NAMES} tensors")
                yield found

    def object_place(self, name: str) -> FileRange | None:
        """Where the bytes of an object are."""
        return self._places.get((name, None))

    def refuse(self, finding: str) -> NoReturn:
        raise UserError(f"{self.folder / METADATA_FILE} {finding}; copy the whole checkpoint.") from None

    def _layers(self, tensor: ChunkedTensor) -> Iterator[tuple[str, StoredTensor]]:
        if not is_of_all_layers(_MAIN_WEIGHT.sub("", tensor.name)):
            yield tensor.name, tensor
            return
        if not tensor.shape:
            self.refuse(f"describes {tensor.name} without its layers")
        for layer in range(tensor.shape[0]):
            yield tensor.name.replace(".layers.", f".layers.{layer}.", 1), replace(tensor, layer=layer)

    def _chunk(self, name: str, members: Mapping[str, Any]) -> Chunk:
        offsets, sizes = counts_of(members.get("offsets")), counts_of(members.get("sizes"))
        place = self._places.get((name, offsets))
        if offsets is None or sizes is None or len(offsets) != len(sizes) or place is None:
            self.refuse(f"does not say where a chunk of {name} is")
        return Chunk(offsets, sizes, place)

    def _range(self, members: Mapping[str, Any]) -> FileRange:
        name, start, nbytes = (members.get(key) for key in ("relative_path", "offset", "length"))
        if type(name) is not str or name != Path(name).name or name in ("", ".", "..") or not name.isprintable():
            self.refuse("names a file that is not in the folder")
        if counts_of((start, nbytes)) is None or members.get("transform_descriptors"):
            self.refuse("has chunks in a form that this program does not read")
        return FileRange(self.folder / name, number_of(start), number_of(nbytes))


def _common(folder: Path, metadata: _Metadata) -> Any:
    """The record of the objects that all ranks share."""
    if (folder / COMMON_FILE).is_file():
        return TorchFile(Window(folder / COMMON_FILE)).root
    place = metadata.object_place(COMMON_KEY)
    if place is None:
        raise UserError(f"{folder} has neither {COMMON_FILE} nor common_state; choose a checkpoint that Megatron-LM has written.")
    root = place.opened().root
    return root[0] if isinstance(root, list) and len(root) == 1 else root
