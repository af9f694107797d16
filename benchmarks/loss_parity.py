"""Measures what quantized communication costs in loss: the same model and data with and without it, paired by seed.

    python -m benchmarks.loss_parity
    python -m benchmarks.loss_parity --groups first --seeds 9 10 11 12
    python -m benchmarks.loss_parity --model wide --groups rows --seeds 1 2 3 4 5 6 7 8
    python -m benchmarks.loss_parity --model islands --groups islands --train-iters 400
    python -m benchmarks.loss_parity --model islands-wide --groups islands-by-rate --train-iters 1024 --seeds 1
    python -m benchmarks.loss_parity --model islands-wide --settings "ZeRO-3, twice the rate" "islands, every 16 steps" --train-iters 1024
    python -m benchmarks.loss_parity --report-only

Trains a small GPT on the bytes of Python's standard library, once per setting and seed. Four ranks, two nodes of two, are threads of one
process that take turns, each with the engine as in any run; so one core is enough. Runs of one seed share initial weights, samples and
their order. So the gap between them is due to the setting and to chance, because any difference in rounding changes the course of a run.
A plain run whose learning rates differ in the sixth digit shows how large that chance is. Seeds run in rounds over all settings. Every
outcome is stored at once and not computed again; the table, the picture and the JSON show all stored ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.loss_study.gaps import gaps_of
from benchmarks.loss_study.record import Record
from benchmarks.loss_study.report import draw, table
from benchmarks.loss_study.settings import GROUPS, PLAIN, SETTINGS, plain_of
from benchmarks.loss_study.text import Text, library_text
from benchmarks.loss_study.training import HELD_OUT_SAMPLES, MODELS, SEQ_LENGTH, common_flags, trained
from benchmarks.report import machine_text, origin
from megatron_zpp.ops import extension

MISTAKE_EXIT_CODE = 2
QUANTIZED = [group for group in GROUPS if "islands" not in group]  # islands have models of their own
OUTPUTS = {
    "narrow": "benchmarks/results/loss_parity.json",
    "wide": "benchmarks/results/loss_parity_wide.json",
    "islands": "benchmarks/results/loss_islands.json",
    "islands-wide": "benchmarks/results/loss_islands_wide.json",
}


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    try:
        return _run(args, arguments)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"loss_parity.py: error: {error}", file=sys.stderr)
        return MISTAKE_EXIT_CODE


def _run(args: argparse.Namespace, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    extension.load()
    made = origin("loss_parity", arguments)
    print(f"{extension.report()} {machine_text(made)}", flush=True)
    text = Text(library_text(Path(args.work_dir)).read_bytes(), SEQ_LENGTH, HELD_OUT_SAMPLES)
    output = Path(args.output or OUTPUTS[args.model]).resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    flags = common_flags(args.train_iters, args.model)
    subject = {"flags": flags, "text_sha256": text.sha256, "held_out_samples": HELD_OUT_SAMPLES}
    record = Record(output, subject, made)
    of_groups = [setting for group in args.groups for setting in GROUPS[group]]
    settings = [SETTINGS[name] for name in args.settings] if args.settings else [*map(plain_of, of_groups), *of_groups]
    for seed in [] if args.report_only else args.seeds:
        for setting in dict.fromkeys(settings):
            if not record.has(setting.name, seed):
                outcome = trained(setting, seed, args.train_iters, text, args.model)
                record.add(outcome)
                print(f"seed {seed}, {setting.name}: {outcome.validation_loss:.4f} ({outcome.cpu_seconds:.0f} s of CPU)", flush=True)
    gaps = list(gaps_of(record.outcomes))
    if not gaps:
        raise ValueError(f"--output {output} holds no plain run, which gaps are measured against; train {PLAIN.name} at the same rate.")
    print(table(gaps))
    draw(gaps, output.with_suffix(".png"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    groups = "; ".join(f"{name}: {', '.join(setting.name for setting in group)}" for name, group in GROUPS.items())
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=QUANTIZED, metavar="GROUP", help=groups.replace("%", "%%"))
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, metavar="SETTING", help="these alone, instead of groups; a gap needs the plain one, too"
    )
    parser.add_argument("--model", choices=MODELS, default="narrow", help="of 0.25 million parameters, the wide ones of 1.6 million")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6, 7, 8], metavar="SEED")
    parser.add_argument("--train-iters", type=int, default=300)
    parser.add_argument("--work-dir", default="runs/loss_parity", help="for the text")
    parser.add_argument("--output", help=f"the outcomes, the picture goes beside it; by default {' or '.join(OUTPUTS.values())}")
    parser.add_argument("--report-only", action="store_true", help="train nothing; write the table and the picture again")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
