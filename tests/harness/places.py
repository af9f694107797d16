"""Where things stand in the repository."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HARNESS = Path(__file__).resolve().parent
IMPORT_FROM = (ROOT, ROOT / "tests")  # for a program that imports the package and the harness


def importing(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that imports the package and the harness."""
    return {**environment, "PYTHONPATH": os.pathsep.join([*map(str, IMPORT_FROM), *filter(None, [environment.get("PYTHONPATH")])])}
