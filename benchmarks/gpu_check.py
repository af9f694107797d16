"""Checks and measures this repository on a machine with a GPU, with one command and without a network.

    bash benchmarks/gpu_check.sh

Needs torch, numpy and nvcc. Every part runs in a process of its own with a time limit; if one fails, the others still run. Writes
gpu_check.json and gpu_check.txt. The exit code is 1 if a check failed. What this machine cannot do is listed with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import date
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from gpu.outcome import NotDone  # noqa: E402

# Modules of gpu/ in the order in which they run, and the seconds that each may take at most; the total stays below 8 minutes.
PARTS = {"machine": 30, "build": 180, "bits": 140, "speed": 80, "training": 90, "ladder": 330}
WHOLE_SECONDS = 470
LEAST_SECONDS = 15


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.run_part:
        return run_part(options.run_part, options.output)
    start = time.monotonic()
    reports = {}
    for name in options.parts:
        seconds_left = WHOLE_SECONDS - (time.monotonic() - start)
        print(f"== {name}", flush=True)
        reports[name] = report_of(name, min(PARTS[name], seconds_left))
        print("\n".join(_lines(name, reports[name])[1:]), flush=True)
    written = {"date": date.today().isoformat(), "seconds": round(time.monotonic() - start, 1), "parts": reports}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "gpu_check.json").write_text(json.dumps(written, indent=1) + "\n")
    text = [f"GPU check of {written['date']}, {written['seconds']} s", *_summary(reports)]
    print("\n".join(["", *text]))
    body = [line for name, report in reports.items() for line in ["", *_lines(name, report)]]
    (options.output / "gpu_check.txt").write_text("\n".join([*text, *body]) + "\n")
    return 1 if any(report["status"] == "failed" for report in reports.values()) else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bash benchmarks/gpu_check.sh", description="Checks and measures this repository on a GPU.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="which parts to run (default: all)")
    parser.add_argument("--output", type=Path, default=FOLDER / "results", help="folder of the reports (default: benchmarks/results)")
    parser.add_argument("--run-part", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def report_of(name: str, seconds: float) -> dict[str, Any]:
    """The outcome of one part as in Outcome.as_json, with the seconds that it took; never raises."""
    if seconds < LEAST_SECONDS:
        return _report("not done", [f"the {WHOLE_SECONDS} s of the whole check were over"])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "outcome.json"
        command = [sys.executable, __file__, "--run-part", name, "--output", str(result)]
        log = Path(folder) / "log.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                end_session(process)
                return _report("failed", [f"no end within {seconds:.0f} s", *log.read_text(errors="replace").splitlines()[-20:]])
        said = log.read_text(errors="replace").splitlines()[-30:]
        report = json.loads(result.read_text()) if result.is_file() else _report("failed", [f"exit code {process.returncode}", *said])
    report["seconds"] = round(time.monotonic() - start, 1)
    return report


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kills a part and all processes that it started; they are in its process session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_part(name: str, result: Path) -> int:
    """Runs a part in this process and writes its report to `result`."""
    try:
        report = importlib.import_module(f"gpu.{name}").run().as_json()
    except NotDone as reason:
        report = _report("not done", [str(reason)])
    except Exception as error:
        report = _report("failed", [f"{type(error).__name__}: {error}", *traceback.format_exc().splitlines()[-25:]])
    result.write_text(json.dumps(report))
    return 0


def _report(status: str, reasons: list[str]) -> dict[str, Any]:
    failures = reasons[:1] if status == "failed" else []
    omissions = reasons[:1] if status == "not done" else []
    return {"status": status, "lines": reasons, "measured": {}, "failures": failures, "omissions": omissions}


def _lines(name: str, report: dict[str, Any]) -> list[str]:
    return [f"== {name}: {report['status']}", *report["lines"], *(f"could not do: {some}" for some in report["omissions"])]


def _summary(reports: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{name}: {report['status']} ({report.get('seconds', 0)} s)" for name, report in reports.items()]
    lines += [f"FAILED, {name}: {failure}" for name, report in reports.items() for failure in report["failures"]]
    return lines + [f"could not do, {name}: {reason}" for name, report in reports.items() for reason in report["omissions"]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
