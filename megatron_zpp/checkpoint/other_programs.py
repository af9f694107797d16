"""Recognizes checkpoints of other programs by the names of their files (no torch). Tools convert them."""

from __future__ import annotations

import os
from pathlib import Path

METADATA_FILE = ".metadata"  # of torch_dist
HF_CONFIG_FILE = "config.json"
HF_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
DEEPSPEED_FOLDERS = "global_step*"  # each holds one iteration


def is_torch_dist(folder: Path) -> bool:
    return os.path.isfile(folder / METADATA_FILE)


def is_deepspeed(folder: Path) -> bool:
    return any(folder.glob("*_model_states.pt"))


def is_legacy(folder: Path) -> bool:
    return any(path.is_dir() for path in folder.glob("mp_rank_[0-9][0-9]*"))


def is_hf(folder: Path) -> bool:
    return os.path.isfile(folder / HF_CONFIG_FILE) and any(any(folder.glob(weights)) for weights in HF_WEIGHTS)


def foreign_checkpoint(directory: Path) -> str | None:
    """What another program wrote into the folder, or into a folder of DeepSpeed's in it, and the remedy. None if nothing is recognized."""
    for folder in (directory, *sorted(directory.glob(DEEPSPEED_FOLDERS))):
        if is_hf(folder):
            return f"{folder} is a model of Hugging Face; {_conversion('convert_from_hf.py')}"
        if is_torch_dist(folder) or is_deepspeed(folder) or is_legacy(folder):
            return f"{folder} is a checkpoint of Megatron or DeepSpeed; {_conversion('convert_from_megatron.py')}"
    return None


def _conversion(tool: str) -> str:
    return f"convert it with tools/{tool}, and give the folder that this tool writes"
