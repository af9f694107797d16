"""Checks and measures this repository on a machine with a GPU, with one command and without a network.

    bash benchmarks/gpu_check.sh --limit-seconds 470 --output FOLDER

Needs torch, numpy and nvcc. Every part is a process of its own with a time limit; if one fails, hangs or is killed, the others still run.
Results are written as they come: FOLDER/gpu_check.json with every part that has ended, gpu_check.txt for people, and parts/NAME.json of
a part that runs. What is printed has less than 12,000 characters, the most important last. What this machine cannot do is listed with the
reason. Exit code: 4 if there is no GPU, else 1 if a check failed, 3 if none did but something did not end in time, else 0.
benchmarks/README.md says how to read the results.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.gpu.part_process import run_part
from benchmarks.gpu.parts import Part, all_parts, chosen
from benchmarks.gpu.rank_processes import FOUND_VARIABLE
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.texts import printed
from benchmarks.gpu.version import commit, source_digest
from benchmarks.report import ROOT

DEFAULT_LIMIT_SECONDS = 470.0
APEX_VARIABLE = "GPU_CHECK_APEX_SOURCES"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.run_part:
        run_part(options.run_part, options.seconds, options.output)
        sys.stdout.flush()
        os._exit(0)  # at once: threads of lanes or NCCL may wait for what will never come
    if options.apex_sources is not None:
        os.environ[APEX_VARIABLE] = str(options.apex_sources.resolve())
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {"date": started, "commit": commit(), "sources": source_digest(), "command": " ".join(arguments)}
    runner = Runner(options.output.resolve(), options.limit_seconds, command, about, lambda text: print(text, flush=True))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: runner.interrupt(f"ended by {signal.Signals(received).name}"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOUND_VARIABLE] = str(Path(folder, "sharing.json"))
        longer = max(1.0, options.limit_seconds / DEFAULT_LIMIT_SECONDS)
        code = runner.run(chosen(options.parts, on_cpu=options.on_cpu, longer=longer))
    print(f"\n{printed(runner.reports, str(options.output / 'gpu_check.txt'))}")
    return code


def command(part: Part, seconds: float, result: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_check", "--run-part", part.name, "--seconds", f"{seconds:.1f}", "--output", str(result)]


def _parse(arguments: list[str]) -> argparse.Namespace:
    names = list(all_parts())
    parser = argparse.ArgumentParser(
        prog="bash benchmarks/gpu_check.sh", description="Checks and measures this repository on a GPU.", allow_abbrev=False
    )
    asked_for = ", ".join(name for name, part in all_parts().items() if not part.is_default)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=names,
        default=(),
        metavar="PART",
        help=f"of {', '.join(names)} (default: all but {asked_for})",
    )
    parser.add_argument("--on-cpu", action="store_true", help="run the parts even if there is no GPU, at tiny size on the CPU")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=DEFAULT_LIMIT_SECONDS,
        help="for all parts together (default: %(default).0f); with more, each part may take longer, too",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check", help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--apex-sources", type=Path, metavar="FOLDER", help="a checkout of NVIDIA Apex, which is built and tried then")
    parser.add_argument("--run-part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=DEFAULT_LIMIT_SECONDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("limit_seconds", "seconds"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is not a time; give seconds above 0")
    if options.apex_sources is not None and "apex" not in options.parts:
        parser.error("--apex-sources is for the part apex, which is not among --parts; add it there")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
