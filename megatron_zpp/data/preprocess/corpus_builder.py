"""Writes the output of preprocessing: a pair of files per JSON key, and the list of skipped lines."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_zpp.data.preprocess.document_encoder import BadLine, EncodedBatch
from megatron_zpp.data.preprocess.indexed_writer import Extent, IndexedDatasetWriter, open_partial, publish, refuse_if_written
from megatron_zpp.data.preprocess.journal import Journal, Progress, pair_prefix
from megatron_zpp.data.preprocess.json_lines import LineBatch, Position
from megatron_zpp.system.output_file import naming_file, sync_folder


class CorpusBuilder:
    """Takes encoded batches in the order of the input, and records its progress in the journal.

    If it is killed at any moment, another builder can resume from its files and ends with the same bytes.
    start: the progress of an earlier builder, None to start anew.
    """

    def __init__(self, journal: Journal, keys: Sequence[str], dtype: np.dtype, journal_seconds: float, start: Progress | None) -> None:
        self._journal = journal
        self._journal_seconds = journal_seconds
        self.prefixes = {key: pair_prefix(journal.prefix, key) for key in keys}
        self.progress = start or Progress(extents={key: Extent() for key in keys})
        self._writers: dict[str, IndexedDatasetWriter] = {}
        self._skipped_list: BinaryIO | None = None
        if start is None:
            for prefix in self.prefixes.values():
                refuse_if_written(prefix)
            journal.remove()  # before any file that it describes changes
        # Complete files, and the list, may have their final names already, so they must not be opened again.
        if not self.progress.is_complete:
            self._open(dtype, resumes=start is not None)
        self._saved_at = time.monotonic()

    @property
    def skipped_list_path(self) -> str:
        return f"{self._journal.prefix}_skipped_lines.txt"

    def add(self, batch: LineBatch, encoded: EncodedBatch, path: str, file_bytes: int) -> None:
        """Writes the documents of one batch and lists its bad lines. file_bytes: read from all inputs so far."""
        if self._skipped_list is None:
            raise RuntimeError(f"{self._journal.prefix} is complete, but the batch at byte {batch.offset} of {path} was added")
        before = self.progress
        first_line = before.position.line if batch.source == before.position.source else 0
        for key, (tokens, lengths, ends) in encoded.documents.items():
            self._writers[key].add_sequences(tokens, lengths, ends)
        with naming_file(Path(self.skipped_list_path)):
            for line in encoded.bad_lines:
                self._skipped_list.write(f"{describe(line, path, first_line)}\n".encode("utf-8", errors="backslashreplace"))
        # Last: after an error above, the files are cut back to the progress of the previous batch.
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
        """Completes all output files and gives them their final names."""
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
        self._journal.finish()

    def stop(self) -> bool:
        """Stops before the end. Returns whether a later builder can resume; if not, no files are left."""
        if not self.progress.text_bytes:
            self.discard()
            return False
        # This fails if the disk is full or the files are already closed; then the journal as saved before is valid.
        with contextlib.suppress(OSError, ValueError):
            if not self.progress.is_complete:
                self._save()
        self._close()
        return True

    def discard(self) -> None:
        """Removes all files that have no final name yet."""
        for writer in self._writers.values():
            writer.discard()
        self._close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{self.skipped_list_path}.partial")
        self._journal.remove()

    def first_skipped_line(self) -> str:
        """Place and reason of the first skipped line; empty if no line was skipped."""
        if self._skipped_list is not None:
            self._skipped_list.flush()
        with open(f"{self.skipped_list_path}.partial", encoding="utf-8") as file:
            return file.readline().rstrip("\n")

    def _open(self, dtype: np.dtype, *, resumes: bool) -> None:
        try:
            for key, prefix in self.prefixes.items():
                self._writers[key] = IndexedDatasetWriter(prefix, dtype, self.progress.extents[key] if resumes else None)
            self._skipped_list = _open_list(self.skipped_list_path, self.progress.skipped_list_bytes)
        except BaseException:
            for writer in self._writers.values():
                if resumes:
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
        if self._skipped_list is not None:
            with naming_file(Path(self.skipped_list_path)):
                self._skipped_list.flush()
                os.fsync(self._skipped_list.fileno())
        self._journal.save(self.progress)
        self._saved_at = time.monotonic()

    def _publish_list(self) -> None:
        """Replaces the list of an earlier run by this run's list. An empty list has no file."""
        if self._skipped_list is not None:
            self._skipped_list.close()
        partial = f"{self.skipped_list_path}.partial"
        if not self.progress.skipped_lines:
            for path in (partial, self.skipped_list_path):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)
        elif os.path.exists(partial) or not os.path.exists(self.skipped_list_path):
            os.replace(partial, self.skipped_list_path)
            sync_folder(Path(partial).parent)


def describe(line: BadLine, path: str, first_line: int) -> str:
    """Place and reason of a bad line. first_line: number of lines in the file before its batch."""
    return f"{path}, line {first_line + line.place + 1}: {line.reason}"


def _open_list(path: str, needed_bytes: int) -> BinaryIO:
    file = open_partial(path, needed_bytes)
    file.truncate(needed_bytes)
    file.seek(needed_bytes)
    return file
