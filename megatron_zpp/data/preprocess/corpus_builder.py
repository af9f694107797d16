"""The output of one preprocessing: a pair of files per JSON key, and the list of lines left out."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from megatron_zpp.data.preprocess.document_encoder import BadLine, EncodedBatch
from megatron_zpp.data.preprocess.indexed_writer import Extent, IndexedDatasetWriter, open_partial, publish
from megatron_zpp.data.preprocess.journal import Journal, Progress
from megatron_zpp.data.preprocess.json_lines import LineBatch, Position


class CorpusBuilder:
    """Takes encoded batches in the order of the input, and says in the journal how far it has come.

    Killed at any moment, it leaves what another one goes on from, to the same bytes. start: the progress of an earlier one.
    """

    def __init__(self, journal: Journal, keys: Sequence[str], dtype: np.dtype, journal_seconds: float, start: Progress | None) -> None:
        self._journal = journal
        self._journal_seconds = journal_seconds
        self.prefixes = {key: f"{journal.prefix}_{key}_document" for key in keys}
        self.progress = start or Progress(extents={key: Extent() for key in keys})
        self._writers: dict[str, IndexedDatasetWriter] = {}
        self._skipped_list: BinaryIO | None = None
        # Complete files may have their final names already, the list too: nothing of them is opened again.
        if not self.progress.is_complete:
            self._open(dtype, goes_on=start is not None)
        self._saved_at = time.monotonic()

    @property
    def skipped_list_path(self) -> str:
        return f"{self._journal.prefix}_skipped_lines.txt"

    def add(self, batch: LineBatch, encoded: EncodedBatch, path: str, file_bytes: int) -> None:
        """Writes the documents of one batch and lists its bad lines. file_bytes: of all inputs so far."""
        if self._skipped_list is None:
            raise RuntimeError(f"{self._journal.prefix} is complete, but gets the batch at byte {batch.offset} of {path}")
        before = self.progress
        first_line = before.position.line if batch.source == before.position.source else 0
        for key, (tokens, lengths, ends) in encoded.documents.items():
            self._writers[key].add_sequences(tokens, lengths, ends)
        for line in encoded.bad_lines:
            self._skipped_list.write(f"{describe(line, path, first_line)}\n".encode("utf-8", errors="backslashreplace"))
        # Only now: an error on the way leaves the progress of the batch before, which the files are cut back to.
        self.progress = replace(
            before,
            position=Position(batch.source, batch.offset + encoded.text_bytes, first_line + encoded.line_count),
            extents={key: writer.extent for key, writer in self._writers.items()},
            file_bytes=file_bytes,
            text_bytes=before.text_bytes + encoded.text_bytes,
            skipped_lines=before.skipped_lines + len(encoded.bad_lines),
            skipped_list_bytes=self._skipped_list.tell(),
        )
        if time.monotonic() - self._saved_at >= self._journal_seconds:
            self._save()

    def finish(self) -> None:
        """Makes all files of the output appear under their names."""
        if not self.progress.is_complete:
            self._save()
            for writer in self._writers.values():
                writer.complete()
            self.progress = replace(self.progress, is_complete=True)
            self._journal.save(self.progress)
        for prefix in self.prefixes.values():
            publish(prefix)
        for writer in self._writers.values():
            writer.close()
        self._publish_list()
        self._journal.remove()

    def stop(self) -> bool:
        """Whether there is something to go on from: what was written, with a journal of how far it goes; if not, nothing is left."""
        if not self.progress.text_bytes:
            self.discard()
            return False
        # A full disk may be why the work stops, or the files are closed already; the journal's last word then stands.
        with contextlib.suppress(OSError, ValueError):
            if not self.progress.is_complete:
                self._save()
        self._close()
        return True

    def discard(self) -> None:
        """Removes all that has no final name yet."""
        for writer in self._writers.values():
            writer.discard()
        self._close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{self.skipped_list_path}.partial")
        self._journal.remove()

    def first_skipped_line(self) -> str:
        """Where the first line left out is, and what is wrong with it; empty where none was."""
        if self._skipped_list is not None:
            self._skipped_list.flush()
        with open(f"{self.skipped_list_path}.partial", encoding="utf-8") as file:
            return file.readline().rstrip("\n")

    def _open(self, dtype: np.dtype, *, goes_on: bool) -> None:
        try:
            for key, prefix in self.prefixes.items():
                self._writers[key] = IndexedDatasetWriter(prefix, dtype, self.progress.extents[key] if goes_on else None)
            self._skipped_list = _open_list(self.skipped_list_path, self.progress.skipped_list_bytes)
        except BaseException:
            for writer in self._writers.values():
                if goes_on:
                    writer.close()
                else:
                    writer.discard()
            raise

    def _close(self) -> None:
        for file in (*self._writers.values(), self._skipped_list):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()

    def _save(self) -> None:
        for writer in self._writers.values():
            writer.sync()
        self._sync_list()
        self._journal.save(self.progress)
        self._saved_at = time.monotonic()

    def _sync_list(self) -> None:
        if self._skipped_list is not None:
            self._skipped_list.flush()
            os.fsync(self._skipped_list.fileno())

    def _publish_list(self) -> None:
        """The list of this run replaces one of an earlier run, also where it is empty and goes."""
        if self._skipped_list is not None:
            self._skipped_list.close()
        partial = f"{self.skipped_list_path}.partial"
        if not self.progress.skipped_lines:
            for path in (partial, self.skipped_list_path):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)
        elif os.path.exists(partial) or not os.path.exists(self.skipped_list_path):
            os.replace(partial, self.skipped_list_path)


def describe(line: BadLine, path: str, first_line: int) -> str:
    """Where a bad line is and what is wrong with it. first_line: lines of the file before its batch."""
    return f"{path}, line {first_line + line.place + 1}: {line.reason}"


def _open_list(path: str, needed_bytes: int) -> BinaryIO:
    file = open_partial(path, needed_bytes)
    file.truncate(needed_bytes)
    file.seek(needed_bytes)
    return file
