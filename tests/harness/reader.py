"""Somebody who types the commands of the pages, one after the other, into a folder with the programs and a little text."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

from harness.forked import Forked
from harness.pages import PAGES, Command, text_of
from harness.places import ROOT
from harness.rank_pool import RankPool
from harness.tiny_runs import entry_in

ENTRY = "pretrain_zeropp_gpt.py"
PROGRAMS = ("benchmarks", "examples", "megatron_zpp", "scripts", "testbed", "tools", ENTRY)
# Flags that are put after those of a page. They change sizes and lengths, and where a benchmark writes.
SIZES = {
    "tools/train_tokenizer.py": "--vocab-size 600",
    ENTRY: "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 4 --lr-warmup-iters 1 --save-interval 2 --log-interval 1 --eval-iters 0 --num-workers 0 --distributed-backend gloo",
    "benchmarks/checkpoint.py": "--directory . --megabytes 16 --piece-megabytes 2 --rounds 2 --iteration-seconds 0.01 --output made.json",
    "benchmarks/code_errors.py": "--draws 16 --blocks 16 --output made.json",
    "benchmarks/data_index.py": "--documents 100 --tokens 100000 --seq-length 64 --rounds 1 --output made.json",
    "benchmarks/dropout.py": "--rounds 1 --output made.json",
    "benchmarks/head_loss.py": "--tokens 32 --hidden-size 32 --vocabularies 128 --chunk-tokens 16 --dtypes fp32 --rounds 1 "
    "--output made.json",
    "benchmarks/host_adam.py": "--layers 2 --hidden-size 64 --rounds 1 --output made.json",
    "benchmarks/paper_table.py": "--output made.md",
    "benchmarks/quantization.py": "--megabytes 1 --rounds 1 --reference-rounds 1 --output made.json",
    "benchmarks/reshard.py": "--rounds 1 --output made.json",
    "benchmarks/sockets.py": "--rounds 1 --output made.json",
    "benchmarks/train_step.py": "--smoke --output made.json",
}


class Reader:
    """What the programs write lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in PROGRAMS:
            (folder / name).symlink_to(ROOT / name)
        texts = (paragraph for page in PAGES for paragraph in text_of(page).split("\n\n"))
        (folder / "my_text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")

    def run(self, command: Command, more: str | None = None) -> str:
        """What the command prints, one that begins with `python`, with the program's small sizes, or with the flags `more`.

        Raises RuntimeError unless it ends with exit code 0.
        """
        python, program, *_ = command.words_with_files
        if python != "python":
            raise ValueError(f"{command.text} is no program of Python")
        flags = SIZES.get(program, "") if more is None else more
        done = Forked(*command.words[1:], *flags.split(), folder=self.folder).finished()
        if done.returncode != 0:
            raise RuntimeError(f"{command.text}\n{done.stdout}{done.stderr}")
        return done.stdout

    def train(self, command: Command, ranks: RankPool, nodes: int, ranks_per_node: int, more: str = "") -> str:
        """What the ranks print that torchrun would start, with small sizes and then the flags `more`. Raises RuntimeError if one fails.

        With --node-local-checkpoints node n > 0 has its folder DIR at DIR_of_node_n, because all nodes are on this machine.
        """
        words = command.words[command.words.index(ENTRY) + 1 :] if ENTRY in command.words else command.words[2:]
        done = ranks.run(nodes, ranks_per_node, entry_on_a_node, str(self.folder), [*words, *SIZES[ENTRY].split(), *more.split()])
        printed = "".join(text for _, text in done)
        if any(code != 0 for code, _ in done):
            raise RuntimeError(f"{command.text}\n{printed}")
        return printed


def entry_on_a_node(folder: str, flags: list[str]) -> tuple[int, str]:
    """The exit code of the entry on this rank, and what it printed."""
    node = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    if node and "--node-local-checkpoints" in flags:
        flags = [f"{word}_of_node_{node}" if before in ("--save", "--load") else word for before, word in pairwise(["", *flags])]
    return entry_in(folder, flags)
