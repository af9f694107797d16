"""Times the saving and loading of checkpoints beside a plain write and read of the same bytes on the same disk.

    python -m benchmarks.checkpoint --directory /path/on/the/disk

One rank saves a state of --megabytes: first it waits for the save, then it saves in the background while iterations multiply matrices.
Every round takes all measures, each round in another order, so that other load on the machine slows all of them equally. Times are medians
over rounds; shares are medians of the shares of each round. Written data is fsynced before the clock stops, and data to read is dropped
from the page cache before the clock starts. All measures begin with an idle disk and an empty cache. Prints a table in Markdown and writes
the same as JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.report import report
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
    """Seconds of one round.

    pause: how long training stood still for a save in the background. background: until that save was complete.
    slowdown: how much longer all iterations that began before it was complete took than without it, including the pause.
    """

    plain_write: float
    save: float
    pause: float
    background: float
    slowdown: float
    plain_read: float
    load: float


@dataclass(frozen=True)
class Memory:
    """Peak bytes beyond the state itself."""

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
        bench = Bench(folder, share, options.iteration_seconds)
        bench.round(0)  # the first round is slower: memory and blocks of the disk are new
        rounds = [bench.round(number) for number in range(options.rounds)]
    finally:
        shutil.rmtree(folder)
    results = _results(rounds, memory, share.nbytes)
    setting = {"threads": options.threads}
    figures = {"state_bytes": share.nbytes, "results": results, "rounds": [vars(one) for one in rounds]}
    report("checkpoint", arguments, setting, table(results, share.nbytes), figures, options.output)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times saving and loading of checkpoints beside plain files.")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure (default: here)")
    parser.add_argument("--megabytes", type=int, default=1024, help="of state that the rank saves (default: %(default)s)")
    parser.add_argument("--piece-megabytes", type=int, default=8, help="of one tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--iteration-seconds", type=float, default=0.5, help="of the training beside a save (default: %(default)s)")
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
    return Manifest(ITERATION, 0, shapes, dict.fromkeys(STATES, ELEMENT_TYPE), {}, {}, {}, {})


def _target(share: Share) -> list[Piece]:
    """Pieces of zeros to load all pieces into."""
    return [replace(piece, values=torch.zeros_like(piece.values)) for piece in share.pieces]


def _saver(folder: Path, share: Share, *, in_background: bool) -> CheckpointSaver:
    return CheckpointSaver(folder, share, SaveOptions(in_background=in_background), gather=lambda text: [text])


class Bench:
    """Runs the measures, each with files of its own in `folder`."""

    def __init__(self, folder: Path, share: Share, iteration_seconds: float) -> None:
        self._share = share
        self._manifest = _manifest(share)
        self._plain, self._saved, self._written = folder / "plain", folder / "saved", folder / "written"
        self._saver = _saver(self._saved, share, in_background=False)
        self._background_saver = _saver(self._written, share, in_background=True)
        self._target = _target(share)
        self._iteration = _Iteration(iteration_seconds)

    def round(self, number: int) -> Round:
        """One round of all measures; `number` decides their order."""
        writes = (self._write_plainly, self._save, self._save_in_background)
        reads = (self._read_plainly, self._load)
        turn = number % len(writes)
        seconds: dict[str, float] = {}
        for measure in (*writes[turn:], *writes[:turn], *(reads[::-1] if number % 2 else reads)):
            self._empty_cache()
            seconds.update(measure())
        for path in (self._saved, self._written):
            shutil.rmtree(path)
        self._plain.unlink()
        return Round(**seconds)

    def _write_plainly(self) -> dict[str, float]:
        return {"plain_write": _seconds(lambda: _write_plainly(self._plain, self._share))}

    def _save(self) -> dict[str, float]:
        return {"save": _seconds(lambda: self._saver.save(self._manifest))}

    def _save_in_background(self) -> dict[str, float]:
        iteration_seconds = statistics.median(_seconds(self._iteration.run) for _ in range(3))
        started = time.perf_counter()
        pause = _seconds(lambda: self._background_saver.save(self._manifest))
        iterations = 0
        while iterations == 0 or self._background_saver.check() is None:
            self._iteration.run()
            pause += _seconds(self._background_saver.wait_for_copy)
            iterations += 1
        seconds = time.perf_counter() - started
        self._background_saver.finish()
        return {"pause": pause, "background": seconds, "slowdown": seconds - iterations * iteration_seconds}

    def _read_plainly(self) -> dict[str, float]:
        return {"plain_read": _seconds(lambda: _read_plainly(self._plain, self._target))}

    def _load(self) -> dict[str, float]:
        for piece in self._target:
            piece.values.zero_()
        seconds = _seconds(lambda: _load(self._saved, self._target))
        if not all(torch.equal(one.values, other.values) for one, other in zip(self._target, self._share.pieces, strict=True)):
            raise RuntimeError("what was loaded is not what was saved")
        return {"load": seconds}

    def _empty_cache(self) -> None:
        os.sync()
        _forget([path for place in (self._plain, self._saved, self._written) for path in (place, *place.rglob("*")) if path.is_file()])


class _Iteration:
    """Work for the processor during a save: products of matrices for about `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._left = torch.rand(512, 512)
        self._product = torch.empty(512, 512)
        self._count = 1
        once = statistics.median(_seconds(self.run) for _ in range(9))
        self._count = max(1, round(seconds / once))

    def run(self) -> None:
        for _ in range(self._count):
            torch.mm(self._left, self._left, out=self._product)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _write_plainly(path: Path, share: Share) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in share.pieces:
            data = _bytes_of(piece)
            for place in range(0, len(data), BUFFER_BYTES):
                file.write(data[place : place + BUFFER_BYTES])
        os.fsync(file.fileno())


def _read_plainly(path: Path, target: Sequence[Piece]) -> None:
    with path.open("rb", buffering=0) as file:
        for piece in target:
            file.readinto(_bytes_of(piece))


def _bytes_of(piece: Piece) -> memoryview:
    """The memory of the piece's values."""
    data: memoryview = piece.values.view(torch.uint8).numpy().data
    return data


def _load(directory: Path, target: Sequence[Piece]) -> None:
    with CheckpointReader(iteration_folder(directory, ITERATION)) as reader:
        reader.fill(target)


def _forget(paths: Sequence[Path]) -> None:
    """Drops files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _memory(folder: Path, share: Share) -> Memory:
    manifest = _manifest(share)
    target = _target(share)

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
    """The largest increase of this process's resident memory during a call (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory that is resident now
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
        "slowdown_seconds": statistics.median(one.slowdown for one in rounds),
        "save_extra_bytes": memory.save,
        "background_save_extra_bytes": memory.background_save,
        "load_extra_bytes": memory.load,
    }


def table(results: dict[str, float], nbytes: int) -> str:
    rows = [
        ("plain write", f"{results['plain_write_gb_per_second']:.2f} GB/s", "", ""),
        ("save", f"{results['save_gb_per_second']:.2f} GB/s", f"{results['save_share_of_plain_write']:.0%} of plain write", "save"),
        ("plain read", f"{results['plain_read_gb_per_second']:.2f} GB/s", "", ""),
        ("load", f"{results['load_gb_per_second']:.2f} GB/s", _load_shares(results), "load"),
        ("pause for a save in the background", f"{results['pause_seconds']:.3f} s", _pause_shares(results), "background_save"),
    ]
    lines = ["| measure | median | beside | memory beyond the state |", "|---|---:|---|---:|"]
    for name, value, beside, memory in rows:
        extra = results[f"{memory}_extra_bytes"] if memory else None
        lines.append(f"| {name} | {value} | {beside} | {'' if extra is None else f'{extra / 2**20:.0f} MiB of {nbytes / 2**20:.0f}'} |")
    return "\n".join(lines)


def _load_shares(results: dict[str, float]) -> str:
    return f"{results['load_share_of_plain_read']:.0%} of plain read, {results['load_share_of_plain_write']:.0%} of plain write"


def _pause_shares(results: dict[str, float]) -> str:
    share = f"{results['pause_share_of_save']:.1%} of a save that is waited for"
    return f"{share}; iterations beside it take {results['slowdown_seconds']:.3f} s longer in all"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
