"""A file that one rank of Megatron has saved: its members, and the tensors of a model in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.megatron.names import is_no_weight, own_name
from megatron_zpp.checkpoint.megatron.pickled import Dictionary, Made, contents_of, members_of
from megatron_zpp.checkpoint.megatron.torch_file import NOT_READ, TensorPlace, TorchFile
from megatron_zpp.checkpoint.megatron.window import Window
from megatron_zpp.system.user_error import UserError

MOST_NAMES = 1 << 20
MOST_LEVELS = 8  # of dictionaries inside one another


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file of torch.save."""

    file: TorchFile
    name: str
    place: TensorPlace

    @property
    def where(self) -> str:
        return f"{self.name} in {self.file.window.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def read(self) -> Tensor:
        return self.file.read(self.place)

    def part(self, start: int, stop: int) -> FileTensor:
        """Elements [start, stop) of a flat tensor."""
        return replace(self, place=replace(self.place, start=self.place.start + start, shape=(stop - start,)))


class RankFile:
    """The file. members: of the dictionary that was saved. Raises UserError if it is no such file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = TorchFile(Window(path))
        self.members = members_of(self.file.root)

    def tensors(self, record: Any) -> Iterator[tuple[str, FileTensor]]:
        """The tensors of nested dictionaries with their dotted names. Raises UserError for anything else among them."""
        waiting = [("", record, MOST_LEVELS)]
        count = 0
        while waiting:
            prefix, found, levels = waiting.pop()
            for key, value in contents_of(found).items():
                name = f"{prefix}{key}"
                count += 1
                if count > MOST_NAMES or not levels:
                    raise UserError(f"{self.path} has more than {MOST_NAMES} names, or names of more than {MOST_LEVELS} levels.")
                if is_no_weight(name) or value is None:
                    continue
                place = self.file.place_of(value)
                if place is not None:
                    yield name, FileTensor(self.file, name, place)
                elif isinstance(value, Made) and own_name(name) is not None:
                    raise UserError(f"{name} in {self.path} {NOT_READ}.")
                elif isinstance(value, Dictionary) or (isinstance(value, Made) and value.contents is not None):
                    waiting.append((f"{name}.", value, levels - 1))
                elif not isinstance(value, Dictionary | Made | list | tuple):
                    raise UserError(f"{self.path} has {name}, which is no tensor of numbers.")
