"""Runs of the pages that need a cluster have flags that its ranks accept."""

from __future__ import annotations

import subprocess

import pytest
from harness.pages import Command, command_of
from harness.places import ROOT
from harness.reader import ENTRY

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve

# Page, the beginning of a command, the ranks that it starts, and those of a node.
WORLDS = [
    ("README.md", "torchrun --nproc_per_node 4", 4, 4),
    ("README.md", "MASTER_ADDR=node0 NODES=2 NODE_RANK=0 bash scripts/torchrun_nodes.sh", 16, 8),
    ("README.md", "python tools/launch.py --hostfile hosts", 16, 8),
    ("README.md", "sbatch scripts/slurm_srun.sbatch", 16, 8),
    ("docs/launching.md", "sbatch --nodes 4", 32, 8),
    ("docs/launching.md", "python tools/launch.py --hostfile hosts", 16, 8),
    ("docs/long_sequences.md", "torchrun --nproc_per_node 4", 4, 4),
    ("docs/tensor_parallel.md", "torchrun --nproc_per_node 4", 4, 4),
    ("docs/coming_from_deepspeed.md", "srun --nodes 4", 64, 16),
    ("docs/coming_from_deepspeed.md", "torchrun --nnodes 4", 64, 16),
    ("docs/coming_from_deepspeed.md", f"python {ENTRY}", 64, 16),
]


def flags_of(command: Command) -> list[str]:
    """What the ranks get: the words after the training script or the script that starts it; of a script of a model, what it adds."""
    (place,) = (
        index for index, word in enumerate(command.words) if word == ENTRY or (word.startswith("scripts/") and not word.endswith("json"))
    )
    if command.words[place] != "scripts/zeropp_18b.sh":
        return command.words[place + 1 :]
    python = 'python() { printf "%s\\0" "$@"; }; exec() { "$@"; }; set --; source scripts/zeropp_18b.sh'
    done = subprocess.run(["bash", "-c", python], cwd=ROOT, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")
    return words[words.index(ENTRY) + 1 : -1]


@pytest.mark.parametrize(("page", "beginning", "world_size", "ranks_per_node"), WORLDS)
def test_a_run_of_a_page_is_accepted_in_its_world(
    page: str, beginning: str, world_size: int, ranks_per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = parse_flags(flags_of(command_of(page, beginning)))
    resolve(config, world_size, ranks_per_node)
