"""Records what one rank does in one step over a slow link: what it computes, and when the hops of each lane cross.

    python -m benchmarks.step_trace --rate 160mbit

Two nodes of two CPU ranks, as in two_nodes.py, run the training script with --profile. Of rank 0's trace the computation of units, its
waits and the hops are kept, in milliseconds after the beginning of the step. docs/draw.py draws them. Needs root or a user namespace.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, origin
from benchmarks.slow_links.configurations import ALL, DEFAULT_MODEL, LEAN, ZERO3
from testbed.network import INTERFACE, Network
from testbed.rates import Rate
from testbed.sandbox import CannotIsolate, enter_own_network

RESULT = ROOT / "benchmarks" / "results" / "step_trace.json"
NODES, RANKS_PER_NODE, PORT = 2, 2, 29500
MEMBERS = {ZERO3: "--zero-stage 3", ALL: "--zeropp paper", LEAN: "--zeropp lean"}
PROFILED = 3  # the iteration: earlier ones fill caches, and lean's first one sends whole weights
TRAINING = f"--bf16 --mock-data --num-workers 0 --micro-batch-size 1 --train-iters {PROFILED} --lr 1e-4 --lr-decay-style constant"
TRAINING += " --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
_COMPUTED = re.compile(r"(forward|backward) (.+)")
_HOP = re.compile(r"(\S+(?: \(frozen\))?) ((?:inter|intra)-(?:climb|descend)) to \w+ (encode|send|decode|wait)")


@dataclass
class Step:
    """Milliseconds after the beginning of the step.

    computed: [phase, unit, start, end]. waits: [start, end] of computation. lanes: for each, hops as
    [unit, encoding starts, encoded, sent, decoding starts, decoded].
    """

    milliseconds: float
    computed: list[list[Any]] = field(default_factory=list)
    waits: list[list[float]] = field(default_factory=list)
    lanes: dict[str, list[list[Any]]] = field(default_factory=dict)


def main() -> None:
    options = _parser().parse_args()
    try:
        enter_own_network(["-m", "benchmarks.step_trace", *sys.argv[1:]])
    except CannotIsolate as error:
        sys.exit(f"step_trace.py: {error}")
    network = Network(NODES)
    network.hold(Rate.parse(options.rate))
    steps = {name: asdict(traced(network, f"{DEFAULT_MODEL} {TRAINING} {flags}".split())) for name, flags in MEMBERS.items()}
    made = {**origin("step_trace", sys.argv[1:]), "model": DEFAULT_MODEL, "rate": options.rate}
    options.output.write_text(json.dumps({**made, "steps": steps}) + "\n", encoding="utf-8")
    print(options.output, {name: round(step["milliseconds"]) for name, step in steps.items()})


def traced(network: Network, flags: Sequence[str]) -> Step:
    """The profiled step of rank 0. Raises RuntimeError if a rank fails, with the end of its output."""
    with tempfile.TemporaryDirectory() as folder:
        profile = f"--profile --profile-dir {folder} --profile-ranks 0 --profile-step-start {PROFILED - 1} --profile-step-end {PROFILED}"
        command = [sys.executable, "-u", str(ROOT / "pretrain_zeropp_gpt.py"), *flags, *profile.split()]
        ranks = [_start(network, rank, command) for rank in range(NODES * RANKS_PER_NODE)]
        said = [rank.communicate()[0] for rank in ranks]
        for rank, process in enumerate(ranks):
            if process.returncode:
                raise RuntimeError(f"rank {rank} ended with exit code {process.returncode}:\n{said[rank][-2000:]}")
        (path,) = Path(folder).glob("*_rank_0.pt.trace.json")
        return step_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def _start(network: Network, rank: int, command: Sequence[str]) -> subprocess.Popen[str]:
    node, local_rank = divmod(rank, RANKS_PER_NODE)
    world = {"WORLD_SIZE": NODES * RANKS_PER_NODE, "LOCAL_WORLD_SIZE": RANKS_PER_NODE, "RANK": rank, "LOCAL_RANK": local_rank}
    environment = {"MASTER_ADDR": network.address(0), "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": 1, **world}
    words = [*network.inside(node), "env", *(f"{name}={value}" for name, value in environment.items()), *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def step_of(events: Sequence[dict[str, Any]], digits: int = 1) -> Step:
    """What the events of one step's trace say of units and hops. A hop without "send" crossed nothing and is left out.

    digits: of the milliseconds.
    """

    def ms(microseconds: float) -> float:
        return round(microseconds / 1000, digits)

    ranges = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event.get("cat") == "user_annotation")
    named = [entry for entry in ranges if entry[2] in ("forward-backward", "optimizer")]
    begin, end = named[0][0], max(stop for _, stop, _ in named)
    step = Step(ms(end - begin))
    under_way: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for start, stop, name in ranges:
        first, last = ms(start - begin), ms(stop - begin)
        if found := _COMPUTED.fullmatch(name):
            step.computed.append([found[1], found[2], first, last])
        elif name == "optimizer":
            step.computed.append([name, "", first, last])
        elif found := _HOP.fullmatch(name):
            unit, lane, part = found.groups()
            if part == "wait":
                step.waits.append([first, last])
                continue
            hop = under_way.setdefault((unit, lane), {})
            hop[part] = (first, last)
            if part == "decode":
                del under_way[unit, lane]
                if "encode" in hop and "send" in hop:
                    step.lanes.setdefault(lane, []).append([unit, *hop["encode"], hop["send"][0], first, last])
    return step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rate", default="160mbit", help="of the link of each node (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser


if __name__ == "__main__":
    main()
