"""Writes files as a whole: whoever reads one finds the old content or the new one, whenever the writer is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    made = path.with_name(f".{path.name}.{os.getpid()}")
    with made.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(made, path)


def write_json(path: Path, content: Any) -> None:
    """What JSON does not know is written as text."""
    write_text(path, json.dumps(content, indent=1, default=str) + "\n")


def read_json(path: Path) -> Any:
    """The content; None if there is no such file, or if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
