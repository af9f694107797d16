"""The checkpoints that a run may start from, as its flags say, in the order in which it tries them (no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatron_zpp.checkpoint.folders import (
    LATEST_FILE,
    LatestError,
    find_checkpoint,
    meant_instead_of,
    newest_first,
    older_checkpoints,
    saved_iterations,
)
from megatron_zpp.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from megatron_zpp.config.flag import spelling_of
from megatron_zpp.config.schema import CheckpointConfig

# A run starts anew without a checkpoint, as jobs that are repeated do at first. Under these flags that cannot be meant.
NEEDS_A_CHECKPOINT = ("finetune", "no_load_optim", "exit_on_missing_checkpoint")


class Candidates(NamedTuple):
    """folders: in order; none if there is no checkpoint yet. notices: why the first is not the one that LATEST_FILE names."""

    folders: tuple[Path, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def first(self) -> Path | None:
        return next(iter(self.folders), None)

    def first_readable(self) -> tuple[Path, Manifest] | None:
        """The first folder whose manifest can be read, and its manifest; None without folders.

        Raises the CheckpointError of the first folder if no manifest can be read.
        """
        errors: list[CheckpointError] = []
        for folder in self.folders:
            try:
                return folder, read_manifest(folder)
            except CheckpointError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return None


def find_candidates(checkpoint: CheckpointConfig) -> Candidates:
    """The checkpoint that --load, --ckpt-step and --pretrained-checkpoint name, with --load-last-good-checkpoint also older ones.

    Raises CheckpointError if the one that is named is not there.
    """
    may_be_older = checkpoint.load_last_good_checkpoint
    found = Candidates() if checkpoint.load is None else _in(Path(checkpoint.load), checkpoint.ckpt_step, may_be_older=may_be_older)
    if not found.folders and checkpoint.pretrained_checkpoint is not None:
        found = _in(Path(checkpoint.pretrained_checkpoint), None, may_be_older=may_be_older)
        if not found.folders:
            check_pretrained_is_there(checkpoint)
    return found


def check_pretrained_is_there(checkpoint: CheckpointConfig) -> None:
    """Raises CheckpointError under --pretrained-checkpoint. Call it where nothing has been found in that folder."""
    if checkpoint.pretrained_checkpoint is not None:
        why = why_nothing_is_loaded(Path(checkpoint.pretrained_checkpoint))
        raise CheckpointError(f"--pretrained-checkpoint {checkpoint.pretrained_checkpoint} {why}; correct the path")


def check_may_begin_anew(checkpoint: CheckpointConfig) -> None:
    """Raises CheckpointError under a flag of NEEDS_A_CHECKPOINT. Call it where `find_candidates` has found nothing."""
    flag = next((spelling_of(name) for name in NEEDS_A_CHECKPOINT if getattr(checkpoint, name)), None)
    if checkpoint.load is not None and flag is not None:
        why = why_nothing_is_loaded(Path(checkpoint.load))
        raise CheckpointError(f"--load {checkpoint.load} {why}, but {flag} needs one; correct the path, or leave {flag} out")


def why_nothing_is_loaded(directory: Path, *, may_be_misspelled: bool = True) -> str:
    """What follows `--load DIRECTORY` where `find_candidates` finds nothing in it.

    may_be_misspelled: name a directory that may have been meant.
    """
    iterations = ", ".join(map(str, saved_iterations(directory)))
    if not iterations:
        return f"holds no checkpoint{meant_instead_of(directory) if may_be_misspelled else ''}"
    return f"has no {LATEST_FILE}, only iterations {iterations} (--ckpt-step or --load-last-good-checkpoint loads one)"


def _in(directory: Path, step: int | None, *, may_be_older: bool) -> Candidates:
    try:
        folder = find_checkpoint(directory, step)
    except LatestError as error:
        # Above a number that was read there are only checkpoints of another branch of the run.
        others = newest_first(directory) if error.named is None else older_checkpoints(error.named)
        if not (may_be_older and others):
            raise
        return Candidates(tuple(others), (f"WARNING: passed over, because {error}",))
    if folder is not None:
        return Candidates((folder, *older_checkpoints(folder)) if may_be_older else (folder,))
    left = newest_first(directory) if may_be_older else []
    notice = f"WARNING: {directory} has no {LATEST_FILE}; the newest good checkpoint there is loaded"
    return Candidates(tuple(left), (notice,) if left else ())
