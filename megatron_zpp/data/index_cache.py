"""GPT indices kept on disk, built once per node: whoever comes first builds under a file lock, everyone else waits there and loads.

No collective is involved, so no rank can time out in one. The files of one set of indices:

    {md5 of the description}-GPTDataset-{split}-{document_index,sample_index,shuffle_index}.npy, -description.txt, .lock
"""

import errno
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from megatron_zpp.data.gpt_indices import GPTIndices

INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class CachedIndices(NamedTuple):
    indices: GPTIndices
    message: str | None  # why nothing was kept on disk


class IndexCache:
    """The place of one set of indices in a cache folder.

    description: everything the indices depend on, JSON values only; other values, other files.
    """

    def __init__(self, folder: Path, split_name: str, description: Mapping[str, object]) -> None:
        self.folder = folder
        self.description = json.dumps(description, indent=4)
        digest = hashlib.md5(self.description.encode(), usedforsecurity=False).hexdigest()
        self.stem = f"{digest}-GPTDataset-{split_name}"

    def load_or_build(self, build: Callable[[], GPTIndices]) -> CachedIndices:
        """The indices, from disk where they are there and whole, else from build; every rank of a node may call this at once."""
        kept = self._load()
        if kept is not None:
            return CachedIndices(kept, None)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_file = open(self._path(".lock"), "ab")
        except OSError as error:
            return CachedIndices(build(), self._not_kept(error))
        with lock_file:
            _lock(lock_file)
            kept = self._load()
            if kept is not None:
                return CachedIndices(kept, None)
            indices = build()
            try:
                self._store(indices)
            except OSError as error:
                return CachedIndices(indices, self._not_kept(error))
            return CachedIndices(indices, None)

    def _load(self) -> GPTIndices | None:
        try:
            if self._path("-description.txt").read_text() != self.description:
                return None
            return GPTIndices(*(_load_array(self._path(f"-{name}.npy")) for name in INDEX_NAMES))
        except (OSError, ValueError, EOFError):
            return None

    def _store(self, indices: GPTIndices) -> None:
        for name, values in zip(INDEX_NAMES, indices, strict=True):
            with _appearing_whole(self._path(f"-{name}.npy")) as file:
                np.save(file, values, allow_pickle=False)
        # Last: its presence says that the arrays are complete.
        with _appearing_whole(self._path("-description.txt")) as file:
            file.write(self.description.encode())

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.stem}{ending}"

    def _not_kept(self, error: OSError) -> str:
        return (
            f"{self.folder} cannot be written ({error.strerror or error}): the indices of this run were built in memory and not kept; "
            "--data-cache-path names another folder."
        )


def _load_array(path: Path) -> np.ndarray:
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    # A plain view of the map: np.memmap as a type slows down every element access.
    return values.view(np.ndarray)


def _lock(file: BinaryIO) -> None:
    """Waits for the file's lock, which closing the file gives back."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        # Without locks several ranks build the same indices; each file still appears whole, with the same bytes.
        if error.errno not in NO_LOCKS_HERE:
            raise


@contextmanager
def _appearing_whole(path: Path) -> Iterator[BinaryIO]:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
