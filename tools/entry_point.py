"""The command `megatron-zpp` of an installed package: runs the training or a tool, each with its own flags."""

import argparse
import ast
import os
import sys
from pathlib import Path

from megatron_zpp import __version__

HERE = Path(__file__).resolve().parent
TOOLS = (
    "build_data_cache",
    "collect_corpus",
    "compare_runs",
    "consolidate_checkpoint",
    "convert_from_hf",
    "convert_from_megatron",
    "convert_to_hf",
    "corpus_statistics",
    "generate_text",
    "inspect_checkpoint",
    "inspect_dataset",
    "launch",
    "merge_datasets",
    "plan_run",
    "plot_run",
    "preprocess_data",
    "train_tokenizer",
    "watch_run",
)
PROGRAMS = {
    "pretrain": HERE.parent / "pretrain_zeropp_gpt.py",
    **{name.replace("_", "-"): HERE / f"{name}.py" for name in TOOLS},
}
DESCRIPTION = """megatron-zpp COMMAND --help prints the flags of a command. On several ranks: torchrun -m pretrain_zeropp_gpt [FLAGS].
python -m megatron_zpp.ops.extension builds the kernels for this machine."""


def main() -> None:
    """Replaces this process by the program that the first word names, so that signals and exit codes are its own."""
    command = _parser().parse_args(sys.argv[1:2]).command
    os.execv(sys.executable, [sys.executable, str(PROGRAMS[command]), *sys.argv[2:]])


def summary(program: Path) -> str:
    """The first sentence of a program's docstring."""
    text = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0]


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<24}{summary(program)}" for name, program in PROGRAMS.items()]
    parser = argparse.ArgumentParser(
        prog="megatron-zpp",
        usage="megatron-zpp COMMAND [FLAGS]",
        description=f"{DESCRIPTION}\n\ncommands:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=PROGRAMS, metavar="COMMAND", help="one of the commands above")
    parser.add_argument("--version", action="version", version=f"megatron_zpp {__version__}")
    return parser
