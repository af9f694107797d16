"""Records the progress of preprocessing in one JSON file beside the output. Each save replaces the file as a whole."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_zpp.config.counted import counted
from megatron_zpp.data.preprocess.indexed_writer import Extent
from megatron_zpp.data.preprocess.json_lines import STANDARD_INPUT, Position
from megatron_zpp.system.output_file import naming_file, new_file, sync_folder
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError

FORMAT = 1
JOURNAL_BYTES = 1 << 30  # it names every input file
START = Position()
FILES = ("tokenizer_model", "vocab_file", "merge_file")  # settings that hold digests of files
LATER_SWITCH = "legacy_tokenizer"  # recorded only where it is off, because journals from before this flag do not have it


class InputFile(NamedTuple):
    """Identifies an input file, to detect that it has changed."""

    path: str
    file_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Progress:
    """What has been read and written. To resume, every output file is cut back to this state.

    is_complete: the partial files hold the complete output and only need their final names.
    """

    position: Position = START
    extents: Mapping[str, Extent] = field(default_factory=dict)  # by JSON key
    file_bytes: int = 0  # read from all inputs so far; compressed bytes if a file is compressed
    text_bytes: int = 0
    skipped_lines: int = 0
    skipped_list_bytes: int = 0
    is_complete: bool = False


@dataclass(frozen=True)
class Journal:
    """The file PREFIX.unfinished, which exists while the work on PREFIX is not finished.

    inputs, settings: everything the output depends on. The work can only be resumed if both are unchanged.
    is_share: the output is a share of a corpus. Its file stays, as PREFIX.finished, and says what the share was made from.
    """

    prefix: str
    inputs: Sequence[InputFile]
    settings: Mapping[str, Any]
    is_share: bool = False

    @property
    def path(self) -> Path:
        return Path(f"{self.prefix}.unfinished")

    def save(self, progress: Progress) -> None:
        content = {
            "format": FORMAT,
            "inputs": self.inputs,
            "settings": self.settings,
            "progress": {**progress.__dict__, "extents": dict(progress.extents)},
        }
        temporary = Path(f"{self.path}.tmp")
        try:
            with naming_file(self.path), new_file(temporary) as file:
                file.write(json.dumps(content, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(Path(self.prefix).parent)

    def load(self) -> Progress | None:
        """The progress to resume from; None if there is no unfinished work, and no finished share.

        Raises UserError, naming what changed, if inputs or settings are not those of that work, or files of a finished share are missing.
        """
        file = OutsideFile(self._found, str(self._found), self.remedy, most_bytes=JOURNAL_BYTES)
        if file.is_missing():
            return None
        content = file.members()
        inputs = [_stored_input(content, values) for values in content.list("inputs")]
        settings, found = content.members("settings").values, _stored_progress(content.members("progress"))
        self._check_settings(settings)
        self._check_inputs(inputs, len(inputs) if found.is_complete else found.position.source + 1)
        if self._found == _finished_path(self.prefix):
            _check_share(self.prefix, found.extents, self.remedy)
        return found

    def finish(self) -> None:
        """Removes the file; that of a share gets its final name."""
        if not self.is_share:
            self.remove()
        elif self.path.exists():
            os.replace(self.path, _finished_path(self.prefix))
            sync_folder(Path(self.prefix).parent)

    def remove(self) -> None:
        """Removes what is recorded of the work, finished or not."""
        found = [path for path in (self.path, _finished_path(self.prefix)) if path.exists()]
        for path in found:
            path.unlink()
        if found:
            sync_folder(Path(self.prefix).parent)

    def _check_settings(self, found: Mapping[str, Any]) -> None:
        for name in {**found, **self.settings}:
            if found.get(name) != self.settings.get(name):
                raise UserError(f"--resume: {_difference(name, found.get(name), self.settings.get(name))}, or {self.remedy}")

    def _check_inputs(self, found: Sequence[InputFile], begun: int) -> None:
        """begun: number of files of which some or all has been read. These must be unchanged; the others may have been repaired."""
        for place, (was, now) in enumerate(zip(found, self.inputs, strict=False)):
            if was.path != now.path:
                raise UserError(f"--resume: --input {now.path} is at the place of {was.path}; give the same, or {self.remedy}")
            if place < begun and was != now:
                raise UserError(
                    f"--resume: --input {now.path} has changed (it had {was.file_bytes} bytes, it has {now.file_bytes}, or it was written "
                    f"anew); {self.remedy}"
                )
        if len(found) != len(self.inputs):
            raise UserError(
                f"--resume: --input names {counted(len(self.inputs), 'file')}, before {len(found)}; give the same, or {self.remedy}"
            )

    @property
    def remedy(self) -> str:
        """How to continue if the work cannot be resumed."""
        return f"to start anew, remove {self._found}."

    @property
    def _found(self) -> Path:
        """The file of the work, finished or not."""
        finished = _finished_path(self.prefix)
        return finished if self.is_share and finished.exists() else self.path


class FinishedShare(NamedTuple):
    """What a share was made with, and how much it has of each JSON key."""

    settings: Mapping[str, Any]
    extents: Mapping[str, Extent]


def read_finished_share(prefix: str) -> FinishedShare:
    """The record of a share. Raises UserError if the share is not finished, or if its files are missing."""
    path = _finished_path(prefix)
    remedy = "make the share with tools/preprocess_data.py --share."
    content = OutsideFile(path, str(path), remedy, most_bytes=JOURNAL_BYTES).members()
    extents = _stored_progress(content.members("progress")).extents
    _check_share(prefix, extents, f"remove {path} and {remedy}")
    return FinishedShare(content.members("settings").values, extents)


def pair_prefix(prefix: str, key: str) -> str:
    """The prefix of the pair of files that has the documents of a JSON key."""
    return f"{prefix}_{key}_document"


def _check_share(prefix: str, keys: Iterable[str], remedy: str) -> None:
    files = [f"{pair_prefix(prefix, key)}.{ending}" for key in keys for ending in ("bin", "idx")]
    missing = next((file for file in files if not os.path.exists(file)), None)
    if missing is not None:
        raise UserError(f"{_finished_path(prefix)} says that the share is finished, but {missing} is missing; {remedy}")


def _finished_path(prefix: str) -> Path:
    return Path(f"{prefix}.finished")


def _difference(name: str, before: Any, now: Any) -> str:
    """What the earlier run had, what the command has now, and what to give instead."""
    flag = f"--{name.replace('_', '-')}"
    had, has = _given(name, flag, before), _given(name, flag, now)
    age = " (or was begun before this flag existed)" if had and name == LATER_SWITCH else ""
    remedy = f"give {had}" if had else f"leave {flag} out"
    return f"the earlier run had {had or f'no {flag}'}{age}, this command has {has or f'no {flag}'}; {remedy}"


def _given(name: str, flag: str, value: Any) -> str:
    """The flag and value that a setting was given by; empty if the flag was not given."""
    if name == LATER_SWITCH:
        return "" if value is False else flag
    if value is None or value is False or value == []:
        return ""
    if value is True:
        return flag
    if name in FILES:
        return f"{flag} with the content of sha256 {value}"
    return " ".join([flag, *map(str, value if isinstance(value, list) else [value])])


def _stored_input(content: Members, values: Any) -> InputFile:
    if not isinstance(values, list) or [type(value) for value in values] != [str, int, int]:
        content.refuse("inputs", "a list of path, bytes and time of change of each file")
    return InputFile(*values)


def _stored_progress(found: Members) -> Progress:
    extents = found.members("extents")
    return Progress(
        position=Position(*_counts(found, "position", len(Position._fields))),
        extents={key: Extent(*_counts(extents, key, len(Extent._fields))) for key in extents.values},
        file_bytes=found.count("file_bytes"),
        text_bytes=found.count("text_bytes"),
        skipped_lines=found.count("skipped_lines"),
        skipped_list_bytes=found.count("skipped_list_bytes"),
        is_complete=found.switch("is_complete"),
    )


def _counts(found: Members, key: str, count: int) -> Sequence[int]:
    values = found.counts(key)
    if len(values) != count:
        found.refuse(key, f"a list of {count} whole numbers")
    return values


def input_files(paths: Sequence[str]) -> list[InputFile]:
    """The input files as they are now. A change of standard input cannot be detected."""
    return [_input_file(path) for path in paths]


def _input_file(path: str) -> InputFile:
    if path == STANDARD_INPUT:
        return InputFile(path, 0, 0)
    status = os.stat(path)
    return InputFile(os.path.abspath(path), status.st_size, status.st_mtime_ns)
