"""Measures what quantized communication costs in loss: the same model and data with and without it, paired by seed.

    python benchmarks/loss_parity.py

Trains a GPT of 5 million parameters on the sources of Python's standard library, on four CPU ranks as two nodes of two, once per setting
and seed. Runs of one seed share initial weights, samples and their order. So the gap between them is due to the setting, and to chance:
any difference in rounding changes the course of a run. Results are stored after every run and not computed again; the table, the picture
and the JSON show all stored results. A run takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INFO = Path("/proc/cpuinfo")
NODES, RANKS_PER_NODE = 2, 2
VOCAB_SIZE = 2048
MODEL = "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --attention-dropout 0 --hidden-dropout 0"
BATCH = "--micro-batch-size 8 --global-batch-size 32"
OPTIMIZER = "--lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 15 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0"
RHYTHM = "--log-interval 10 --eval-iters 32"
SHARDING = f"--zero-stage 3 --ranks-per-node {RANKS_PER_NODE}"

WEIGHTS = "--zero-quantized-weights"
SECONDARY = f"--zero-hpz-partition-size {RANKS_PER_NODE}"
GRADIENTS = "--zero-quantized-gradients"
ALL = f"{WEIGHTS} {SECONDARY} {GRADIENTS}"
INTRA_8 = "--zero-quantized-gradients-intra-bits 8"
ROTATED = "--zero-quantized-gradients-rotation hadamard"
PLAIN = "ZeRO-3"
SETTINGS = {
    PLAIN: "",
    "qwZ": WEIGHTS,
    "qgZ": GRADIENTS,
    "all": ALL,
    "all, 8-bit intra": f"{ALL} {INTRA_8}",
    "all, rotation": f"{ALL} {ROTATED}",
    "all, 8-bit intra, rotation": f"{ALL} {INTRA_8} {ROTATED}",
}


@dataclass(frozen=True)
class Outcome:
    """One run. Losses are nats per token; bytes are per step."""

    setting: str
    seed: int
    validation_loss: float
    training_losses: dict[str, float]  # by iteration
    inter_node_bytes: float
    seconds: float


@dataclass(frozen=True)
class Gap:
    """A setting's final validation loss compared with plain ZeRO-3's, over the seeds that have both."""

    setting: str
    percents: tuple[float, ...]  # by seed
    mean_loss: float
    inter_node_bytes: float

    @property
    def mean(self) -> float:
        return statistics.mean(self.percents)

    @property
    def standard_error(self) -> float:
        return statistics.stdev(self.percents) / math.sqrt(len(self.percents)) if len(self.percents) > 1 else math.nan


class Results:
    """The file of outcomes. Raises ValueError if it was made with other flags."""

    def __init__(self, path: Path, common_flags: str) -> None:
        self._path = path
        self._common_flags = common_flags
        self.outcomes: list[Outcome] = []
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.outcomes = [Outcome(**outcome) for outcome in stored["outcomes"]]
            is_known = all(SETTINGS.get(outcome.setting) == stored["settings"].get(outcome.setting) for outcome in self.outcomes)
            if stored["flags"] != common_flags or not is_known:
                raise ValueError(f"{path} holds runs with other flags or settings; give another --output or remove it.")

    def has(self, setting: str, seed: int) -> bool:
        return any((outcome.setting, outcome.seed) == (setting, seed) for outcome in self.outcomes)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        stored = {"flags": self._common_flags, "settings": SETTINGS, "outcomes": [asdict(outcome) for outcome in self.outcomes]}
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._path)


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    work_dir, output = Path(args.work_dir).resolve(), Path(args.output).resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    results = Results(output, common_flags(args.train_iters))
    data = prepared_data(work_dir)
    for seed in args.seeds:
        for setting in dict.fromkeys([PLAIN, *args.settings]):
            if not results.has(setting, seed):
                results.add(trained(setting, seed, args.train_iters, data, work_dir))
                print(
                    f"seed {seed}, {setting}: {results.outcomes[-1].validation_loss:.4f} ({results.outcomes[-1].seconds:.0f} s)", flush=True
                )
    gaps = list(gaps_of(results.outcomes))
    print(table(gaps))
    draw(gaps, output.with_suffix(".png"))
    return 0


# ---- Runs ------------------------------------------------------------------------------------------------------------------------------


def common_flags(train_iters: int) -> str:
    precision = "--bf16" if multiplies_bf16() else ""
    length = f"--train-iters {train_iters} --lr-decay-iters {train_iters} --eval-interval {train_iters}"
    return " ".join([MODEL, BATCH, OPTIMIZER, RHYTHM, SHARDING, length, precision]).strip()


def multiplies_bf16() -> bool:
    """Whether the processor multiplies bf16 natively; if not, fp32 is faster."""
    return CPU_INFO.is_file() and any(name in CPU_INFO.read_text(encoding="utf-8") for name in ("avx512_bf16", "amx_bf16"))


def prepared_data(work_dir: Path) -> str:
    """The flags for the quickstart's corpus as tokens; makes it if it is missing."""
    corpus, tokenizer, data = work_dir / "corpus.jsonl", work_dir / "tokenizer.model", work_dir / "corpus_text_document"
    sentence_piece = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(tokenizer)]
    if not corpus.is_file():
        run_python("tools/collect_corpus.py", "--output", str(corpus), "--max-megabytes", "20")
    if not tokenizer.is_file():
        run_python(
            *["tools/train_tokenizer.py", "--input", str(corpus), "--model-prefix", str(tokenizer.with_suffix(""))],
            *["--vocab-size", str(VOCAB_SIZE), "--max-megabytes", "5"],
        )
    if not data.with_suffix(".idx").is_file():
        run_python(
            *["tools/preprocess_data.py", "--input", str(corpus), "--output-prefix", str(work_dir / "corpus"), "--append-eod"],
            *sentence_piece,
        )
    return " ".join(["--data-path", str(data), "--split 95,4,1", *sentence_piece, "--num-workers 0"])


def trained(setting: str, seed: int, train_iters: int, data: str, work_dir: Path) -> Outcome:
    """Trains once under torchrun; the output is in the working folder. Raises subprocess.CalledProcessError if the run fails."""
    name = f"{setting.replace(', ', '_').replace(' ', '-')}_{seed}"
    log, output = work_dir / f"{name}.jsonl", work_dir / f"{name}.txt"
    log.unlink(missing_ok=True)
    flags = f"{common_flags(train_iters)} {data} {SETTINGS[setting]} --seed {seed} --log-jsonl {log}".split()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(NODES * RANKS_PER_NODE)]
    start = time.monotonic()
    with output.open("w", encoding="utf-8") as stream:
        run_python(*launcher, "pretrain_zeropp_gpt.py", *flags, stdout=stream, stderr=subprocess.STDOUT)
    seconds = time.monotonic() - start
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "lm_loss" in line]
    return Outcome(
        setting=setting,
        seed=seed,
        validation_loss=next(line["validation_loss"] for line in reversed(lines) if "validation_loss" in line),
        training_losses={str(step["iteration"]): step["lm_loss"] for step in steps},
        inter_node_bytes=steps[-1]["inter_node_bytes"],
        seconds=seconds,
    )


def run_python(*arguments: str, **streams: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=True, **streams)  # type: ignore[call-overload]


# ---- Figures ---------------------------------------------------------------------------------------------------------------------------


def gaps_of(outcomes: Sequence[Outcome]) -> Iterator[Gap]:
    """The gap of every setting that shares a seed with plain ZeRO-3, in the order of SETTINGS."""
    by_setting: dict[str, dict[int, Outcome]] = {setting: {} for setting in SETTINGS}
    for outcome in outcomes:
        by_setting[outcome.setting][outcome.seed] = outcome
    plain = by_setting[PLAIN]
    for setting, by_seed in by_setting.items():
        seeds = sorted(plain.keys() & by_seed.keys())
        if seeds:
            percents = tuple(100 * (by_seed[seed].validation_loss / plain[seed].validation_loss - 1) for seed in seeds)
            mean_loss = statistics.mean(by_seed[seed].validation_loss for seed in seeds)
            yield Gap(setting, percents, mean_loss, by_seed[seeds[0]].inter_node_bytes)


def table(gaps: Sequence[Gap]) -> str:
    """A Markdown table, one row per setting."""
    plain_bytes = gaps[0].inter_node_bytes
    lines = [
        "| setting | MB into a node per step | share | validation loss, mean | gap to ZeRO-3 | standard error | seeds |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for gap in gaps:
        is_plain = gap.setting == PLAIN
        bytes_cells = f"{gap.inter_node_bytes / 1e6:.2f} | {gap.inter_node_bytes / plain_bytes:.3f}"
        gap_cells = "- | -" if is_plain else f"{gap.mean:+.2f} % | {gap.standard_error:.2f} %"
        lines.append(f"| {gap.setting} | {bytes_cells} | {gap.mean_loss:.4f} | {gap_cells} | {len(gap.percents)} |")
    return "\n".join(lines)


def draw(gaps: Sequence[Gap], path: Path) -> None:
    """Draws every setting's gap: a dot per seed, and a line at the mean with its standard error."""
    from matplotlib.figure import Figure

    shown = [gap for gap in gaps if gap.setting != PLAIN]
    figure = Figure(figsize=(8, 0.55 * len(shown) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    for row, gap in enumerate(shown):
        axes.plot(gap.percents, [row] * len(gap.percents), "o", color="tab:blue", alpha=0.4, markersize=4)
        axes.errorbar(gap.mean, row, xerr=gap.standard_error, fmt="|", color="tab:red", markersize=14, capsize=4)
    axes.axvline(0.0, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [gap.setting for gap in shown])
    axes.invert_yaxis()
    axes.set_xlabel("gap to ZeRO-3 in final validation loss, percent (dots: seeds; red: mean and standard error)")
    figure.savefig(path, dpi=150)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=", ".join(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="SEED")
    parser.add_argument("--train-iters", type=int, default=150)
    parser.add_argument("--work-dir", default="runs/loss_parity", help="for the corpus and the runs' logs")
    parser.add_argument("--output", default="benchmarks/results/loss_parity.json", help="the outcomes; the picture goes beside it")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
