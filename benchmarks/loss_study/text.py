"""The text of the study: Python's standard library as bytes, its last part held out."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.report import ROOT

VOCABULARY = 256
SEPARATOR = b"\0"
MOST_MEGABYTES = 1000  # more than the standard library has


class Text:
    """Samples of `length` bytes with the byte after each as its label.

    Training samples begin at random places that depend on seed and step alone. Held-out samples follow each other from the start of the
    held-out part, the same in every run.
    Raises ValueError if the text is too short for `held_out` samples and a training part nine times as long.
    """

    def __init__(self, content: bytes, length: int, held_out: int) -> None:
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        held_out_numel = held_out * length + 1
        if len(values) < 10 * held_out_numel:
            raise ValueError(f"the text has {len(values)} bytes, and {held_out} held-out samples of {length} need {10 * held_out_numel}")
        self._length = length
        self._training = values[: len(values) - held_out_numel]
        self._held_out = values[len(values) - held_out_numel :].long()
        self.sha256 = hashlib.sha256(content).hexdigest()

    def training_batch(self, seed: int, step: int, samples: int) -> tuple[Tensor, Tensor]:
        """tokens [samples, length] and labels [samples, length] of the global batch of a step."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self._training) - self._length, (samples,), generator=generator)
        rows = torch.stack([self._training[start : start + self._length + 1] for start in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

    def held_out(self) -> tuple[Tensor, Tensor]:
        """tokens [held_out, length] and labels [held_out, length]."""
        return self._held_out[:-1].view(-1, self._length), self._held_out[1:].view(-1, self._length)


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: Tensor, labels: Tensor, at_once: int) -> float:
    """The mean loss of samples [samples, length], nats per byte. at_once: samples in one forward."""
    total = 0.0
    for first in range(0, len(tokens), at_once):
        rows = slice(first, first + at_once)
        total += model(tokens[rows], labels[rows], first_sample=0).double().sum().item()
    return total / tokens.numel()


def library_text(work_dir: Path) -> Path:
    """A file in `work_dir` with every source file of this Python's standard library; makes it if it is missing."""
    path = work_dir / "text.bin"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(SEPARATOR.join(document.encode() for document in _sources()))
    return path


def _sources() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        words = [str(ROOT / "tools" / "collect_corpus.py"), "--output", str(corpus), "--max-megabytes", str(MOST_MEGABYTES)]
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        with open(corpus, encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]
