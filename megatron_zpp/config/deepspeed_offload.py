"""Reads where a DeepSpeed JSON keeps the optimizer's state: the object offload_optimizer, and the older key cpu_offload.

Source: deepspeed/runtime/zero/offload_config.py of DeepSpeed 0.17.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.flag import FlagError, any_of

OFFLOAD, OLDER = "zero_optimization.offload_optimizer", "zero_optimization.cpu_offload"
DEVICES = ("cpu", "none")
# Keys of the object that change nothing: what is copied is always pinned, and there are always two places for it.
WITHOUT_MEANING = (
    "pin_memory",
    "buffer_count",
    "fast_init",
    "pipeline",
    "pipeline_read",
    "pipeline_write",
    "nvme_path",
    "cpuadam_cores_perc",
)


def offloads_optimizer(file: str, values: Mapping[str, Any]) -> tuple[bool, str] | None:
    """Whether the optimizer's state is to be kept on the host, and the key that says so; None if no key does.

    values: of the file, by dotted key. Raises FlagError if a value is not available, or if the two keys contradict each other.
    """
    found, older = values.get(OFFLOAD), values.get(OLDER)
    asked = None if found in (None, False, {}) else _of_object(file, found)
    if older is None:
        return None if asked is None else (asked, OFFLOAD)
    if not isinstance(older, bool):
        raise FlagError(f"{OLDER} {json.dumps(older)} in {file} is not true or false; correct it.")
    if asked is not None and asked != older:
        raise FlagError(f"{OFFLOAD} {json.dumps(found)} in {file} contradicts {OLDER} {json.dumps(older)}; leave {OLDER} out.")
    return older, OLDER


def _of_object(file: str, found: Any) -> bool:
    if not isinstance(found, dict):
        raise FlagError(f'{OFFLOAD} {json.dumps(found)} in {file} is not an object; write {{"device": "cpu"}}.')
    device = found.get("device", "none")
    if device == "nvme":
        raise FlagError(
            f'{OFFLOAD}.device "nvme" in {file} is not available, because the optimizer\'s state is kept in memory and never on a disk; '
            'choose "cpu".'
        )
    if device not in DEVICES:
        raise FlagError(f"{OFFLOAD}.device {json.dumps(device)} in {file} is not available; choose {any_of(DEVICES)}.")
    if device == "none":
        return False
    for key, value in found.items():
        if key == "ratio" and not (isinstance(value, int | float) and not isinstance(value, bool) and value == 1):
            raise FlagError(
                f"{OFFLOAD}.ratio {json.dumps(value)} in {file} is not available, because all of the optimizer's state is kept on the host "
                "or nothing; choose 1.0."
            )
        if key == "super_offload" and value not in (None, False):
            raise FlagError(f"{OFFLOAD}.super_offload {json.dumps(value)} in {file} is not available; leave the key out.")
        if key not in ("device", "ratio", "super_offload", *WITHOUT_MEANING):
            known = any_of(["device", "ratio", *WITHOUT_MEANING])
            raise FlagError(f"{OFFLOAD}.{key} in {file} is not a key of a DeepSpeed configuration; choose {known}.")
    return True
