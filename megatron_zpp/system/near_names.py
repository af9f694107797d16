"""Which of the names that are there was probably meant by one that is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

LEAST_LIKENESS = 0.8  # of two names of files; less like are names of different things with a common ending


def nearest_name(name: str, others: Iterable[str], least_likeness: float = LEAST_LIKENESS) -> str | None:
    """The one of the others that is most like `name`, apart from capitals; None if none is so much like it."""
    by_lower_case = {other.lower(): other for other in others}
    alike = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=least_likeness)
    return by_lower_case[alike[0]] if alike else None


def nearest_file(path: Path) -> Path | None:
    """The file in the folder of `path` whose name is most like its own; None if none is."""
    try:
        name = nearest_name(path.name, (other.name for other in path.parent.iterdir() if other.is_file()))
    except OSError:
        return None
    return None if name is None else path.with_name(name)
