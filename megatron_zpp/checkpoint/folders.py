"""The folders in a directory of checkpoints: their names, which one to load, and which ones to delete.

DIR/latest_checkpointed_iteration.txt      the iteration to load, or `release`, as in Megatron
DIR/iter_0000100/                          a complete checkpoint
DIR/release/                               weights without a run, such as converted ones
DIR/latest_checkpointed_iteration.txt.new-TOKEN   about to replace it
DIR/iter_0000200.tmp-TOKEN/                being written
DIR/iter_0000200.replaced-TOKEN/           complete; a newer one of the same iteration is taking its place
DIR/iter_0000100.removed-TOKEN/            being deleted
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron_zpp.checkpoint.durable import rename_durably, write_durably
from megatron_zpp.checkpoint.manifest import ITERATION_NAME, MANIFEST_FILE, CheckpointError, is_complete, is_whole, read_marker
from megatron_zpp.checkpoint.other_programs import foreign_checkpoint
from megatron_zpp.system.file_lock import try_lock
from megatron_zpp.system.near_names import nearest_name
from megatron_zpp.system.outside import OutsideFile
from megatron_zpp.system.owner import own_token

LATEST_FILE = "latest_checkpointed_iteration.txt"
LATEST_BYTES = 1 << 12  # limit of a number or a word
RELEASE = "release"
_NAME = re.compile(rf"({ITERATION_NAME}|release)(\.(?P<stage>tmp|replaced|removed)-(?P<token>[0-9a-f-]+))?")


class LatestError(CheckpointError):
    """LATEST_FILE names no checkpoint of its directory. named: the missing folder; None if the file cannot be read as a name."""

    def __init__(self, sentence: str, named: Path | None = None) -> None:
        super().__init__(sentence)
        self.named = named


class Stage(Enum):
    """The state of a folder that is not a complete checkpoint, as its name says."""

    UNFINISHED = "tmp"
    REPLACED = "replaced"
    REMOVED = "removed"


@dataclass(frozen=True)
class Leftover:
    """A folder that a process is, or was, writing, replacing or deleting."""

    folder: Path
    stage: Stage
    token: str

    @property
    def final(self) -> Path:
        """The final folder of the checkpoint."""
        return self.folder.with_name(self.folder.name.split(".")[0])


def iteration_folder(directory: Path, iteration: int) -> Path:
    """The folder of one iteration, named as in Megatron."""
    return directory / f"iter_{iteration:07d}"


def staged_folder(final: Path, stage: Stage, token: str) -> Path:
    """The folder beside a checkpoint's final folder for this stage. token: of the process that creates it, see `owner`."""
    return final.with_name(f"{final.name}.{stage.value}-{token}")


def leftovers(directory: Path) -> list[Leftover]:
    """All folders whose names say that they are not complete checkpoints. A process may still be writing some of them."""
    found = [(path, _NAME.fullmatch(path.name)) for path in sorted(directory.iterdir())]
    return [Leftover(path, Stage(match["stage"]), match["token"]) for path, match in found if match and match["stage"]]


def saved_iterations(directory: Path) -> list[int]:
    """The iterations that have a final folder, ascending, complete or not."""
    matches = (_NAME.fullmatch(path.name) for path in directory.glob("iter_*") if path.is_dir())
    return sorted(int(match["iteration"]) for match in matches if match and not match["stage"])


def in_place(final: Path) -> Path | None:
    """The final folder if it exists. If a run died between two renames, the complete folder that was to be replaced. Else None."""
    if final.is_dir():
        return final
    if not final.parent.is_dir():
        return None
    replaced: Sequence[Leftover] = [found for found in leftovers(final.parent) if found.stage is Stage.REPLACED and found.final == final]
    return next((found.folder for found in replaced if is_complete(found.folder)), None)


def final_folders(directory: Path) -> list[Path]:
    """The final folders of all checkpoints in a directory, which may be missing, complete or not, by their names.

    One of which only a folder of stage REPLACED is left, which stands for it, is among them.
    """
    if not directory.is_dir():
        return []
    found = {iteration_folder(directory, iteration) for iteration in saved_iterations(directory)}
    found |= {left.final for left in leftovers(directory) if left.stage is Stage.REPLACED}
    release = directory / RELEASE
    return sorted(found | ({release} if release.is_dir() else set()))


def check_holds_own_checkpoints(directory: Path) -> None:
    """Raises CheckpointError if the directory is itself a checkpoint, or if another program wrote the checkpoints that it holds."""
    _refuse_a_checkpoint(directory, "--ckpt-step")
    if not any((final / MANIFEST_FILE).is_file() for final in final_folders(directory)):
        _refuse_other_programs(directory)


def meant_instead_of(directory: Path) -> str:
    """` (did you mean OTHER?)` with a directory of checkpoints that is in `directory`, or has a like name beside it; empty without one."""
    names_beside = (path.parent.name for path in Path(os.path.abspath(directory)).parent.glob(f"*/{LATEST_FILE}"))
    near = nearest_name(directory.name, (name for name in names_beside if name != directory.name))
    inside = sorted(path.parent for path in directory.glob(f"*/{LATEST_FILE}"))
    meant = inside or ([directory.with_name(near)] if near is not None else [])
    return f" (did you mean {meant[0]}?)" if meant else ""


def find_checkpoint(directory: Path, step: int | None, choice: str = "--ckpt-step") -> Path | None:
    """The folder to load: that of iteration `step`, or of the latest iteration if step is None. None if `directory` holds no checkpoint.

    choice: the flag or argument that chooses an iteration, for errors.
    Raises CheckpointError if iteration `step` is missing, if `directory` is itself a checkpoint, or if another program wrote what it holds,
    and LatestError if the latest iteration cannot be determined or is missing.
    """
    _refuse_a_checkpoint(directory, choice)
    try:
        folder = _named_folder(directory, step, choice)
    except CheckpointError:
        _refuse_other_programs(directory)
        raise
    if folder is None or not os.path.isfile(folder / MANIFEST_FILE):
        _refuse_other_programs(directory if folder is None else folder)
    return folder


def _named_folder(directory: Path, step: int | None, choice: str) -> Path | None:
    if step is not None:
        folder = in_place(iteration_folder(directory, step))
        if folder is None:
            raise CheckpointError(f"{choice} {step}: {directory} holds no checkpoint of this iteration; it holds {_existing(directory)}")
        return folder
    latest = directory / LATEST_FILE
    text = read_latest(directory, f"name another folder, or choose an iteration with {choice}")
    if text is None:
        return None
    named = folder_named(directory, text)
    if named is None:
        raise LatestError(
            f"{latest} holds {text[:40]!r} instead of an iteration; choose one with {choice}, {directory} holds {_existing(directory)}"
        )
    folder = in_place(named)
    if folder is None:
        raise LatestError(
            f"{latest} names {text}, which {directory} does not hold; choose one with {choice}, it holds {_existing(directory)}", named
        )
    return folder


def folder_named(directory: Path, latest: str) -> Path | None:
    """The final folder that the text of LATEST_FILE names, which need not exist; None if the text names none."""
    if latest == RELEASE:
        return directory / RELEASE
    return iteration_folder(directory, int(latest)) if latest.isascii() and latest.isdigit() and len(latest) < 20 else None


def read_latest(directory: Path, remedy: str = "correct --load, or choose an iteration with --ckpt-step") -> str | None:
    """The text of LATEST_FILE without white space around it; None if there is no such file.

    Raises LatestError if it cannot be read, which ends in the remedy.
    """
    path = directory / LATEST_FILE
    file = OutsideFile(path, str(path), remedy, LatestError, LATEST_BYTES)
    return None if file.is_missing() else file.text().strip()


def find_part(folder: Path, directory: Path) -> Path:
    """The folder in another directory that has a part of the same checkpoint. Raises CheckpointError if there is none."""
    part = in_place(directory / folder.name)
    if part is None or read_marker(part) != read_marker(folder):
        has = "no checkpoint of that name" if part is None else "one of another save"
        raise CheckpointError(f"--load {folder.parent} {directory}: {directory} has {has} as {folder}; give the folders of one run's nodes")
    return part


def newest_first(directory: Path) -> list[Path]:
    """The final folders of all iterations, newest first, complete or not."""
    return [iteration_folder(directory, iteration) for iteration in reversed(saved_iterations(directory))]


def older_checkpoints(folder: Path) -> list[Path]:
    """The folders of earlier iterations in the same directory, newest first, complete or not."""
    match = _NAME.fullmatch(folder.name)
    if match is None or match["iteration"] is None:
        return []
    older = [iteration for iteration in saved_iterations(folder.parent) if iteration < int(match["iteration"])]
    return [iteration_folder(folder.parent, iteration) for iteration in reversed(older)]


def move_latest(directory: Path, text: str) -> None:
    """Makes LATEST_FILE name an iteration or `release`, atomically: a reader sees the old or the new file, never a part of one."""
    temporary = directory / f"{LATEST_FILE}.new-{own_token()}"
    temporary.unlink(missing_ok=True)  # left by a failed save of this process
    write_durably(temporary, text)
    rename_durably(temporary, directory / LATEST_FILE)


def check_latest_can_move(flag: str, directory: Path) -> None:
    """Raises CheckpointError if a folder has the name of LATEST_FILE, which `move_latest` cannot replace. flag: names the directory."""
    latest = directory / LATEST_FILE
    if latest.is_dir() and not latest.is_symlink():
        raise CheckpointError(f"{flag} {directory}: {LATEST_FILE} is a folder, so that no checkpoint can be saved; remove it")


def left_latest_files(directory: Path) -> list[tuple[Path, str]]:
    """The temporary files of `move_latest` that are there, each with the token of its process."""
    return [(path, path.name.rpartition(".new-")[2]) for path in sorted(directory.glob(f"{LATEST_FILE}.new-*"))]


def put_in_place(unfinished: Path, final: Path, token: str) -> None:
    """Gives a complete folder its final name. An older folder of that name is first renamed to stage REPLACED, then deleted."""
    aside = staged_folder(final, Stage.REPLACED, token)
    if final.exists():
        rename_durably(final, aside)
    rename_durably(unfinished, final)
    shutil.rmtree(aside, ignore_errors=True)


def delete_or_restore(leftover: Leftover) -> None:
    """Deletes a leftover of a dead run, or restores it if it is a complete checkpoint whose replacement never arrived."""
    if leftover.stage is Stage.REPLACED and not leftover.final.exists() and is_complete(leftover.folder):
        rename_durably(leftover.folder, leftover.final)
    else:
        shutil.rmtree(leftover.folder, ignore_errors=True)


def iterations_to_delete(iterations: Iterable[int], current: int, keep_last: int | None, retain_interval: int | None) -> list[int]:
    """The complete iterations to delete after `current` has been saved.

    These are kept: the last `keep_last` up to the current one (one, if only retain_interval is given), the multiples of retain_interval,
    and all that are later than the current one, because they belong to another branch of the run.
    """
    if keep_last is None and retain_interval is None:
        return []
    until_now = sorted(iteration for iteration in iterations if iteration <= current)
    last = set(until_now[-(keep_last or 1) :])
    return [
        iteration
        for iteration in until_now
        if iteration not in last and (retain_interval is None or iteration % retain_interval != 0) and iteration != current
    ]


def delete_checkpoint(folder: Path, token: str) -> bool:
    """Deletes a checkpoint. It is renamed first, so that no incomplete checkpoint is ever visible.

    Returns False, and deletes nothing, if a process is reading it or if the file system refuses, for example because the directory is
    write-protected. A checkpoint that somebody else deletes meanwhile counts as deleted: to tidy up must not cost a run.
    """
    removed = staged_folder(folder, Stage.REMOVED, token)
    try:
        is_moved = _move_aside(folder, removed)
    except FileNotFoundError:
        return True
    except OSError:
        is_moved = removed.exists()  # the folder was renamed, and only the sync of its directory failed
    if is_moved:
        shutil.rmtree(removed, ignore_errors=True)
    return is_moved


def _move_aside(folder: Path, removed: Path) -> bool:
    """Renames a checkpoint unless a process is reading it, which cannot be seen without locks; returns whether it did."""
    with (folder / MANIFEST_FILE).open("r+b") as manifest:
        if not try_lock(manifest):
            return False
        rename_durably(folder, removed)
    return True


def complete_iterations(directory: Path) -> list[int]:
    """The iterations whose checkpoints have a whole manifest, ascending. Their tensors are not checked."""
    return [iteration for iteration in saved_iterations(directory) if is_whole(iteration_folder(directory, iteration))]


def _refuse_a_checkpoint(directory: Path, choice: str) -> None:
    """Raises CheckpointError if the folder is one checkpoint instead of a folder of checkpoints."""
    match = _NAME.fullmatch(Path(os.path.abspath(directory)).name)
    if match is None or match["stage"] or not (directory / MANIFEST_FILE).is_file():
        return
    chosen = f"with --load, {choice}" if choice.startswith("--") else choice
    this = f" ({chosen} {int(match['iteration'])} chooses this iteration)" if match["iteration"] else ""
    raise CheckpointError(f"{directory} is one checkpoint; give its parent folder, {os.path.normpath(directory / '..')}{this}")


def _refuse_other_programs(folder: Path) -> None:
    """Raises CheckpointError if another program wrote the checkpoints in the folder, unless it also holds checkpoints of this one."""
    has_own = any(os.path.isfile(path / MANIFEST_FILE) for path in newest_first(folder))
    finding = None if has_own else foreign_checkpoint(folder)
    if finding is not None:
        raise CheckpointError(finding) from None


def _existing(directory: Path) -> str:
    return ", ".join(map(str, saved_iterations(directory))) or f"none{meant_instead_of(directory)}"
