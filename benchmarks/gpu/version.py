"""Says which version of this repository is checked: the commit, and a digest of the sources for copies without git."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from benchmarks.report import ROOT

SOURCES = ("megatron_zpp", "csrc", "testbed", "benchmarks/gpu", "pretrain_zeropp_gpt.py")
SUFFIXES = (".py", ".cpp", ".cu", ".h", ".txt")


def commit(root: Path = ROOT) -> str:
    """The commit that is checked out, with a mark if tracked files differ from it; `unknown` without git."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return f"{head} with changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else head


def source_digest(root: Path = ROOT) -> str:
    """16 hex digits of the names and bytes of all sources that are checked."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = root / source
        for file in [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.suffix in SUFFIXES):
            digest.update(f"{file.relative_to(root)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
