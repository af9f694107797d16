"""Prepares the data of a run before it starts, on one machine without GPUs: indices, blends and the check of token ids.

Takes the unchanged flags of the run and the number of all its ranks. Indices that exist already are not built again.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time

from cli.command import errors_in_words, parsed_with_flags_of_run, rank_count

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.counted import counted
from megatron_zpp.config.resolve import resolve
from megatron_zpp.data.blended_dataset import BlendedDataset
from megatron_zpp.data.build_once import ProgressPrinter
from megatron_zpp.data.gpt_dataset import SampleSource
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.kept_rules import with_kept_rules
from megatron_zpp.training.sample_order import order_notices
from megatron_zpp.training.stored_run import find_stored_run

FLAGS_HELP = "the flags of pretrain_zeropp_gpt.py, as the run will get them; --data-cache-path says where the indices go"


def main() -> None:
    parser = _parser()
    args, flags = parsed_with_flags_of_run(parser, sys.argv[1:])
    with errors_in_words(parser):
        run(args, flags)


def run(args: argparse.Namespace, flags: list[str]) -> None:
    """Prepares the data and prints what was prepared. Raises UserError for flags and data that the run would refuse."""
    config = resolve(with_checkpoint_args(parse_flags(flags)), args.ranks, args.ranks)
    stored = find_stored_run(config.checkpoint)
    config, about_rules = with_kept_rules(config, stored)
    for line in (*about_rules, *(order_notices(config, stored) if stored is not None else ())):
        print(line)
    if not config.data.names_corpora:
        raise UserError("--data-path is not given, nor another flag that names corpora; give the flags of the run.")
    from megatron_zpp.training import setup  # torch is imported from here on

    started = time.monotonic()
    progress = ProgressPrinter(f"build_data_cache on {socket.gethostname()}", print)
    datasets = setup.build_run_data(config, setup.build_vocabulary(config), stored, progress, checks_token_ids=not args.no_token_check)
    for message in datasets.messages:
        print(message)
    validation = {f"validation {name}".strip(): dataset for name, dataset in datasets.valid.items()}
    found: dict[str, SampleSource | None] = {"training": datasets.train, **(validation or {"validation": None}), "test": datasets.test}
    for name, dataset in found.items():
        print(f"{name}: {_in_words(dataset)}")
    print(f"ready in {time.monotonic() - started:.1f} s")


def _in_words(dataset: SampleSource | None) -> str:
    if dataset is None:
        return "nothing"
    blend = f" of {counted(len(dataset.datasets), 'corpus', 'corpora')}" if isinstance(dataset, BlendedDataset) else ""
    return f"{counted(len(dataset), 'sample')}{blend}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build_data_cache.py",
        usage="%(prog)s --ranks N [flags of the run]",
        description=__doc__,
        epilog=FLAGS_HELP,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks",
        type=rank_count,
        required=True,
        help="number of all ranks of the run; those that share layers or samples count too",
    )
    parser.add_argument("--no-token-check", action="store_true", help="leave the check of token ids, which reads every .bin, to the run")
    return parser


if __name__ == "__main__":
    main()
