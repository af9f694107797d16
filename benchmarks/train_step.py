"""Compares training steps on one node, in turns: time and peak memory. Of our ZeRO-3 and its peers, or of sizes of tensor groups.

    python -m benchmarks.train_step --ranks 2
    python -m benchmarks.train_step --peers fsdp2 deepspeed    # with DeepSpeed's ZeRO-3, if it is installed
    python -m benchmarks.train_step --ranks 4 --tensor 1 2 4

With --tensor, ZeRO-3 shares its layers among as many ranks, and above 1 also with --sequence-parallel; all have the same batch and
micro-batch, so T ranks that share layers have T times as many micro-batches.
Each has processes of its own, because memory is counted per process. The worlds exist from start to end, but never run at the same time.
Memory is the peak during the timed steps minus what the process held before it built its model: weights, gradients, optimizer state,
activations, buffers. On a machine with GPUs there is one rank per GPU over NCCL, and memory is that of the GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.report import report
from benchmarks.slow_links.configurations import DEEPSPEEDS, PEERS, SMOKE_MODEL, ZERO3, Workload
from benchmarks.slow_links.peers import peers_named
from benchmarks.slow_links.ranks import Ranks

DEFAULT_MODEL = "--num-layers 10 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 6144"
SHARED_SMOKE_MODEL = "--num-layers 1 --hidden-size 128 --num-attention-heads 8 --seq-length 16 --vocab-size 1024"
SECONDS_PER_ANSWER = 600.0
MISTAKE_EXIT_CODE = 2
FAILURE_EXIT_CODE = 1


@dataclass(frozen=True)
class Result:
    """seconds: per step of the slowest rank, one per round. peak_bytes: of the rank that needs most, minus its bytes before the model."""

    name: str
    seconds: list[float]
    peak_bytes: int
    losses: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class World:
    """The ranks of one configuration. name: of a peer, or of ours with `flags`."""

    def __init__(self, name: str, workload: Workload, flags: list[str]) -> None:
        self.name = name
        environment = {"MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workload.world_size))}
        self.ranks = Ranks([[]], workload.ranks_per_node, "127.0.0.1", environment)
        self.machine = self.ranks.start(SECONDS_PER_ANSWER)
        self._ask(ask="load", name=name)
        self._held = [answer["held_bytes"] for answer in self._ask(ask="reset_peak")]
        self._ask(ask="build", name=name, flags=flags)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        """One round: a step that is not timed, then `steps` that are."""
        self._ask(ask="run", name=self.name, steps=1)
        if not self.seconds:
            self._ask(ask="reset_peak")
        answers = self._ask(ask="run", name=self.name, steps=steps)
        self.seconds.append(max(answer["seconds"] for answer in answers) / steps)
        self.losses.append(answers[0]["loss"])

    def result(self) -> Result:
        peaks = [answer["peak_bytes"] - held for answer, held in zip(self._ask(ask="peak"), self._held, strict=True)]
        return Result(self.name, self.seconds, max(peaks), self.losses)

    def _ask(self, **question: Any) -> list[dict[str, Any]]:
        return self.ranks.ask_all(SECONDS_PER_ANSWER, **question)


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    workload = Workload(1, options.ranks, options.model, options.micro_batch_size, options.gradient_accumulation, options.flags.split())
    worlds: list[World] = []
    try:
        chosen = compared(workload, options.tensor, options.peers)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        for name, flags in chosen.items():
            worlds.append(World(name, workload, flags))
        for index in range(options.rounds):
            for world in worlds if index % 2 == 0 else reversed(worlds):
                world.run(options.steps)
        results = [world.result() for world in worlds]
        machine = worlds[0].machine
        for world in worlds:
            world.ranks.end()
    except ValueError as error:
        print(f"train_step.py: error: {error}", file=sys.stderr)
        return MISTAKE_EXIT_CODE
    except RuntimeError as error:
        print(f"train_step.py: failed: {error}", file=sys.stderr)
        return FAILURE_EXIT_CODE
    finally:
        for world in worlds:
            world.ranks.kill()
    setting: dict[str, object] = {
        "ranks": options.ranks,
        "parameters": workload.parameters,
        "tokens_per_step": workload.tokens_per_step,
        "device": machine["device"],
    }
    if any(result.name in DEEPSPEEDS for result in results):
        setting["deepspeed"] = machine["deepspeed"]
    report("train_step", arguments, setting, table(results), {"results": [asdict(result) for result in results]}, options.output)
    return 0


def compared(workload: Workload, tensor_sizes: Sequence[int], peers: Sequence[str]) -> dict[str, list[str]]:
    """The flags of the compared configurations, by their names. tensor_sizes: empty for ours and the peers. peers: words of --peers."""
    if not tensor_sizes:
        return {name: workload.flags(name) for name in (*peers_named(peers), ZERO3)}
    found = {}
    for size in tensor_sizes:
        flags = [*workload.flags(ZERO3), "--tensor-model-parallel-size", str(size)]
        found[f"T = {size}"] = flags
        if size > 1:
            found[f"T = {size}, sequence parallel"] = [*flags, "--sequence-parallel"]
    return found


def table(results: list[Result]) -> str:
    peer = results[0]
    lines = [
        f"| | step, ms (least to most) | of the step of {peer.name} | peak memory, MiB | of that of {peer.name} | loss at the end |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        ratios = [own / other for own, other in zip(result.seconds, peer.seconds, strict=True)]
        spread = f"{result.median * 1e3:.0f} ({min(result.seconds) * 1e3:.0f} to {max(result.seconds) * 1e3:.0f})"
        memory = f"{result.peak_bytes / 2**20:.0f} | {result.peak_bytes / peer.peak_bytes:.2f}"
        lines.append(f"| {result.name} | {spread} | {statistics.median(ratios):.3f} | {memory} | {result.losses[-1]:.4f} |")
    return "\n".join(lines)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed, of each in every round (default: %(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="FLAGS", help="of the training script (default: %(default)s)")
    parser.add_argument("--flags", default="", metavar="FLAGS", help="more flags of the training script")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--gradient-accumulation", type=int, default=1, metavar="K", help="micro-batches per step (default: %(default)s)")
    parser.add_argument("--tensor", type=int, nargs="+", default=[], metavar="T", help="sizes of tensor groups to compare")
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=["fsdp2"], metavar="PEER", help=f"of {', '.join(PEERS)} (default: fsdp2 alone)"
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="file to write the same figures to")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and one round; its figures mean nothing")
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(model=SHARED_SMOKE_MODEL if options.tensor else SMOKE_MODEL, rounds=1, steps=2)
    if options.tensor and options.peers != ["fsdp2"]:
        parser.error(f"--peers {' '.join(options.peers)} has no meaning with --tensor, which compares our ZeRO-3 alone; give one of them")
    for size in options.tensor:
        if size < 1 or options.ranks % size:
            parser.error(f"--tensor {size} does not divide --ranks {options.ranks}; leave it out")
    for name in ("ranks", "rounds", "steps", "micro_batch_size", "gradient_accumulation"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is too small; give 1 or more")
    return options


def _leave(number: int, frame: object) -> NoReturn:
    raise RuntimeError(f"ended by {signal.Signals(number).name}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
