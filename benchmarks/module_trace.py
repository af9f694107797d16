"""Records what a program with a module of its own sees of a step in torch's profiler: units, what they wait for, and the hops beside them.

    python -m benchmarks.module_trace

Two nodes of two CPU ranks on this machine train examples/shard_your_own_module.py with ZeRO-3. docs/draw.py draws the step of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.report import ROOT, origin
from benchmarks.step_trace import Step, step_of
from examples.shard_your_own_module import ViT, global_batch
from megatron_zpp import leave_world, shard
from megatron_zpp.monitor.profiler import all_threads

RESULT = Path(__file__).resolve().parent / "results" / "module_trace.json"
UNITS = ["patches", "layers.0", "layers.1"]
NODES, RANKS_PER_NODE, PORT = 2, 2, 29517
PROFILED = 3  # the step: earlier ones fill caches


def main() -> None:
    options = _parser().parse_args()
    if "RANK" in os.environ:
        _train(options.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "step.json"
        world = {"WORLD_SIZE": NODES * RANKS_PER_NODE, "LOCAL_WORLD_SIZE": RANKS_PER_NODE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
        command = [sys.executable, "-m", "benchmarks.module_trace", "--output", str(part)]
        places = [{**world, "RANK": rank, "LOCAL_RANK": rank % RANKS_PER_NODE} for rank in range(NODES * RANKS_PER_NODE)]
        environments = [{**os.environ, **{name: str(value) for name, value in place.items()}} for place in places]
        ranks = [subprocess.Popen(command, cwd=ROOT, env=environment) for environment in environments]
        if any([rank.wait() for rank in ranks]):
            sys.exit("module_trace.py: a rank failed, as it says above")
        step = json.loads(part.read_text(encoding="utf-8"))
    options.output.write_text(json.dumps({**origin("module_trace", sys.argv[1:]), "step": step}) + "\n", encoding="utf-8")
    print(options.output, round(step["milliseconds"]), "ms")


def _train(output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = ViT()
    engine = shard(model, UNITS)
    for step in range(PROFILED):
        images, labels = (part[engine.rank :: engine.world_size] for part in global_batch(step))
        with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads()) as trace:
            with record_function("forward-backward"):
                engine.backward(cross_entropy(model(images), labels))
            with record_function("optimizer"):
                engine.step(learning_rate=3e-3)
    if engine.rank == 0:
        file = output.with_suffix(".trace.json")
        trace.export_chrome_trace(str(file))
        found: Step = step_of(json.loads(file.read_text(encoding="utf-8"))["traceEvents"], digits=3)
        output.write_text(json.dumps(asdict(found)), encoding="utf-8")
    engine.close()
    leave_world()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser


if __name__ == "__main__":
    main()
