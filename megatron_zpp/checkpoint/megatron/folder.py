"""Finds a checkpoint of Megatron in a folder, and opens it in whichever format it is."""

from __future__ import annotations

from pathlib import Path

from megatron_zpp.checkpoint.megatron.deepspeed import read_deepspeed
from megatron_zpp.checkpoint.megatron.legacy import read_legacy
from megatron_zpp.checkpoint.megatron.source import Source
from megatron_zpp.checkpoint.megatron.torch_dist import read_torch_dist
from megatron_zpp.checkpoint.other_programs import is_deepspeed, is_legacy, is_torch_dist
from megatron_zpp.system.outside import OutsideFile
from megatron_zpp.system.user_error import UserError

READERS = ((is_torch_dist, read_torch_dist), (is_deepspeed, read_deepspeed), (is_legacy, read_legacy))
TRACKER = "latest_checkpointed_iteration.txt"
DEEPSPEED_TRACKER = "latest"
MOST_TRACKER_BYTES = 200  # it has the name of a folder


def read_source(folder: Path) -> Source:
    """The checkpoint of one iteration. Raises UserError for a folder of another program."""
    for is_of_kind, read in READERS:
        if is_of_kind(folder):
            return read(folder)
    raise UserError(
        f"{folder} has neither .metadata nor mp_rank_*/model_optim_rng.pt nor *_model_states.pt; give --input the folder "
        "that --save of Megatron named, or the one of an iteration in it."
    )


def find_iteration(directory: Path, step: int | None) -> Path:
    """The folder of an iteration: of `step`, or the latest, or the directory itself if it is one. Raises UserError if there is none."""
    if not directory.is_dir():
        raise UserError(f"--input {directory} is not a folder; correct the path.")
    if step is None and any(is_of_kind(directory) for is_of_kind, _ in READERS):
        return directory
    names = _latest(directory) if step is None else (f"iter_{step:07d}", f"global_step{step}")
    for name in names:
        if name == Path(name).name and name not in ("", ".", "..") and (directory / name).is_dir():
            return directory / name
    which = "the latest iteration" if step is None else f"iteration {step}"
    raise UserError(f"--input {directory} has no checkpoint of {which}; give the folder of an iteration or another --ckpt-step.")


def _latest(directory: Path) -> tuple[str, ...]:
    tag, text = (_word(directory / name) for name in (DEEPSPEED_TRACKER, TRACKER))
    numbered = (f"iter_{int(text):07d}", f"global_step{int(text)}") if text.isascii() and text.isdecimal() else (text,)
    return tuple(name for name in (tag, *numbered) if name)


def _word(path: Path) -> str:
    file = OutsideFile(path, str(path), "copy it again.", most_bytes=MOST_TRACKER_BYTES)
    return "" if file.is_missing() else file.text().strip()
