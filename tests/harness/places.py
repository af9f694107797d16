"""Where things stand in the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HARNESS = Path(__file__).resolve().parent
IMPORT_FROM = (ROOT, ROOT / "tests")  # for a program that imports the package and the harness
