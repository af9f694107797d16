"""How fast checkpoints are saved and loaded on this machine: beside a plain write and read of the same bytes on the same disk.

    python benchmarks/checkpoint.py --directory /path/on/the/disk

One rank saves a state of --megabytes, waiting and in the background. Every round takes all measures in turn, so that whatever else the
machine does slows them alike; times are medians over rounds, shares are medians of the shares of each round. Files are fsynced before a
clock stops and leave the page cache before they are read. Prints a table in Markdown and writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.manifest import ELEMENT_TYPE, Manifest
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions, Share
from megatron_zpp.zero.pieces import Piece

STATES = ("weight", "exp_avg", "exp_avg_sq")
BUFFER_BYTES = 16 << 20
ITERATION = 1


@dataclass(frozen=True)
class Round:
    """Seconds of one round. pause: what training sees of a save in the background. background: until that save is in place."""

    plain_write: float
    save: float
    pause: float
    background: float
    plain_read: float
    load: float


@dataclass(frozen=True)
class Memory:
    """Bytes beyond the state itself at the fullest moment."""

    save: int
    background_save: int
    load: int


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    share = _share(options.megabytes << 20, options.piece_megabytes << 20)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_benchmark_", dir=options.directory))
    try:
        memory = _memory(folder, share)
        rounds = [_round(folder, share) for _ in range(options.rounds)]
    finally:
        shutil.rmtree(folder)
    command = f"python benchmarks/checkpoint.py {' '.join(arguments)}".strip()
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    results = _results(rounds, memory, share.nbytes)
    print(f"{', '.join(f'{name} {value}' for name, value in machine.items())}; `{command}`\n\n{_table(results, share.nbytes)}")
    if options.output:
        measured = {"command": command, **machine, "state_bytes": share.nbytes, "results": results, "rounds": [vars(one) for one in rounds]}
        options.output.write_text(json.dumps(measured, indent=2) + "\n")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times saving and loading of checkpoints beside plain files.")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure (default: here)")
    parser.add_argument("--megabytes", type=int, default=1024, help="of state that the rank saves (default: %(default)s)")
    parser.add_argument("--piece-megabytes", type=int, default=8, help="of one tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def _share(nbytes: int, piece_bytes: int) -> Share:
    numel = piece_bytes // 4
    count = max(1, nbytes // piece_bytes // len(STATES))
    generator = torch.Generator().manual_seed(1)
    pieces = [
        Piece(f"blocks.{index}.weight", state, 0, numel, torch.rand(numel, generator=generator))
        for index in range(count)
        for state in STATES
    ]
    return Share(0, 1, pieces)


def _manifest(share: Share) -> Manifest:
    shapes = {piece.parameter: (piece.stop,) for piece in share.pieces}
    return Manifest(ITERATION, 0, shapes, dict.fromkeys(STATES, ELEMENT_TYPE), {"scheduled_samples": 0}, {}, {}, {})


def _saver(folder: Path, share: Share, *, in_background: bool) -> CheckpointSaver:
    return CheckpointSaver(folder, share, SaveOptions(in_background=in_background), gather=lambda text: [text])


def _round(folder: Path, share: Share) -> Round:
    manifest = _manifest(share)
    plain, saved, written = folder / "plain", folder / "saved", folder / "written"
    waiting, in_background = _saver(saved, share, in_background=False), _saver(written, share, in_background=True)
    plain_write = _seconds(lambda: _write_plainly(plain, share))
    save = _seconds(lambda: waiting.save(manifest))
    started = time.perf_counter()
    pause = _seconds(lambda: in_background.save(manifest))
    in_background.finish()
    background = time.perf_counter() - started
    target = [Piece(piece.parameter, piece.state, piece.start, piece.stop, torch.zeros_like(piece.values)) for piece in share.pieces]
    _forget([plain, *iteration_folder(saved, ITERATION).iterdir()])
    plain_read = _seconds(lambda: _read_plainly(plain, target))
    load = _seconds(lambda: _load(saved, target))
    if not all(torch.equal(one.values, other.values) for one, other in zip(target, share.pieces, strict=True)):
        raise RuntimeError("what was loaded is not what was saved")
    for path in (saved, written):
        shutil.rmtree(path)
    plain.unlink()
    return Round(plain_write, save, pause, background, plain_read, load)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _write_plainly(path: Path, share: Share) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in share.pieces:
            data = memoryview(piece.values.view(torch.uint8).numpy())
            for place in range(0, len(data), BUFFER_BYTES):
                file.write(data[place : place + BUFFER_BYTES])
        os.fsync(file.fileno())


def _read_plainly(path: Path, target: Sequence[Piece]) -> None:
    with path.open("rb", buffering=0) as file:
        for piece in target:
            file.readinto(memoryview(piece.values.view(torch.uint8).numpy()))


def _load(directory: Path, target: Sequence[Piece]) -> None:
    with CheckpointReader(iteration_folder(directory, ITERATION)) as reader:
        reader.fill(target)


def _forget(paths: Sequence[Path]) -> None:
    """Takes files out of the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _memory(folder: Path, share: Share) -> Memory:
    manifest = _manifest(share)
    target = [Piece(piece.parameter, piece.state, piece.start, piece.stop, torch.zeros_like(piece.values)) for piece in share.pieces]

    def save_in_background() -> None:
        saver = _saver(folder / "memory", share, in_background=True)
        saver.save(manifest)
        saver.finish()

    save = _peak_bytes(lambda: _saver(folder / "memory", share, in_background=False).save(manifest))
    load = _peak_bytes(lambda: _load(folder / "memory", target))
    background_save = _peak_bytes(save_in_background)
    shutil.rmtree(folder / "memory")
    return Memory(save, background_save, load)


def _peak_bytes(call: Callable[[], object]) -> int:
    """By how much the resident memory of this process rises at most during a call (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset to what is resident now
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _results(rounds: Sequence[Round], memory: Memory, nbytes: int) -> dict[str, float]:
    def rate(name: str) -> float:
        return nbytes / 1e9 / statistics.median(getattr(one, name) for one in rounds)

    return {
        "plain_write_gb_per_second": rate("plain_write"),
        "save_gb_per_second": rate("save"),
        "save_share_of_plain_write": statistics.median(one.plain_write / one.save for one in rounds),
        "plain_read_gb_per_second": rate("plain_read"),
        "load_gb_per_second": rate("load"),
        "load_share_of_plain_read": statistics.median(one.plain_read / one.load for one in rounds),
        "load_share_of_plain_write": statistics.median(one.plain_write / one.load for one in rounds),
        "pause_seconds": statistics.median(one.pause for one in rounds),
        "pause_share_of_save": statistics.median(one.pause / one.save for one in rounds),
        "background_seconds": statistics.median(one.background for one in rounds),
        "save_extra_bytes": memory.save,
        "background_save_extra_bytes": memory.background_save,
        "load_extra_bytes": memory.load,
    }


def _table(results: dict[str, float], nbytes: int) -> str:
    rows = [
        ("plain write", f"{results['plain_write_gb_per_second']:.2f} GB/s", "", ""),
        ("save", f"{results['save_gb_per_second']:.2f} GB/s", f"{results['save_share_of_plain_write']:.0%} of plain write", "save"),
        ("plain read", f"{results['plain_read_gb_per_second']:.2f} GB/s", "", ""),
        ("load", f"{results['load_gb_per_second']:.2f} GB/s", _load_shares(results), "load"),
        (
            "pause of a save in the background",
            f"{results['pause_seconds']:.3f} s",
            f"{results['pause_share_of_save']:.1%} of a save that is waited for",
            "background_save",
        ),
    ]
    lines = ["| measure | median | beside | memory beyond the state |", "|---|---:|---|---:|"]
    for name, value, beside, memory in rows:
        extra = results[f"{memory}_extra_bytes"] if memory else None
        lines.append(f"| {name} | {value} | {beside} | {'' if extra is None else f'{extra / 2**20:.0f} MiB of {nbytes / 2**20:.0f}'} |")
    return "\n".join(lines)


def _load_shares(results: dict[str, float]) -> str:
    return f"{results['load_share_of_plain_read']:.0%} of plain read, {results['load_share_of_plain_write']:.0%} of plain write"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
