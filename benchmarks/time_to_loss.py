"""Measures how long training takes over a slow link until it has a loss: FSDP2, ZeRO-3, ZeRO++, lean, larger batches, and islands.

    python -m benchmarks.time_to_loss
    python -m benchmarks.time_to_loss losses --settings lean "islands, H = 16" --learning-rates 5e-4
    python -m benchmarks.time_to_loss --smoke        # tests in a few minutes that all works; its figures mean nothing
    python -m benchmarks.time_to_loss report

Two nodes of one rank, network namespaces as in benchmarks/two_nodes.py, train a GPT on the bytes of Python's standard library. The loss
after a step does not depend on the link, so it is measured in two parts:

    losses     each setting trains without a limit, once per learning rate, and reads held-out text on the way
    seconds    the time of a step of each setting, at each rate of the link, in rounds; the fastest counts, because others use the machine
    whole      whole runs over the limited link, whose time shows that the two parts may be put together
    report     the tables

All samples are those of one seed, and equal after equal tokens. The learning rate is constant after a short warm-up, so that each point of
a curve is the end of a shorter run. Evaluations are not timed. Every finished part is stored at once and not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.loss_study.text import library_text
from benchmarks.report import ROOT, origin
from benchmarks.slow_links.configurations import Workload
from benchmarks.slow_links.program import end_by_exceptions, exit_code_of
from benchmarks.slow_links.session import Session
from benchmarks.time_study.analysis import Findings
from benchmarks.time_study.record import Curve, Record
from benchmarks.time_study.report import TABLES
from benchmarks.time_study.settings import MODEL, OPTIMIZER, SAMPLES_PER_RANK, SETTINGS, SMOKE_MODEL, WARMUP_STEPS, Setting
from testbed.rates import UNLIMITED, Rate
from testbed.sandbox import enter_own_network

NODES, RANKS_PER_NODE = 2, 1
PARTS = ("losses", "seconds", "whole", "report")
RATES = ("unlimited", "200mbit", "50mbit", "10mbit")
WHOLE = ("lean", "islands, H = 16")
TOKENS = 393_216  # 192 steps of the smallest batch
TOKENS_PER_POINT = 32_768  # two steps of the largest
HELD_OUT_SAMPLES = 64
SECONDS, ROUNDS = 4.0, 2
SMOKE = {"model": SMOKE_MODEL, "tokens": 2048, "tokens_per_point": 1024, "rates": ["unlimited", "200mbit"], "seconds": 0.1, "rounds": 1}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    return exit_code_of("time_to_loss.py", lambda: _run(options, arguments))


def _run(options: argparse.Namespace, arguments: list[str]) -> None:
    if set(options.parts) != {"report"}:
        enter_own_network(["-m", "benchmarks.time_to_loss", *arguments])
        end_by_exceptions()
        study = Study(options, arguments)
        session = Session(study.world, [])
        try:
            for part in (part for part in PARTS if part in options.parts and part != "report"):
                getattr(study, part)(session)
            session.end()
        finally:
            session.close()
    if "report" in options.parts:
        found = Findings(Record.stored(options.output))
        print("\n\n".join(table(found) for table in TABLES))


class Study:
    """What the options ask for. Each part does what the record lacks."""

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str]) -> None:
        self._options = options
        self.world = Workload(NODES, RANKS_PER_NODE, options.model, SAMPLES_PER_RANK)
        self._settings = [SETTINGS[name] for name in options.settings]
        self._rates = [Rate.parse(text) for text in options.rates]
        largest = max(self.world.tokens_per_step * setting.batch for setting in self._settings)
        if options.tokens_per_point % largest or options.tokens % options.tokens_per_point:
            raise ValueError(
                f"--tokens-per-point {options.tokens_per_point} must be a multiple of {largest}, the tokens of the largest step, and "
                f"divide --tokens {options.tokens}."
            )
        self._text = library_text(Path(options.work_dir).resolve())
        subject = {
            "nodes": NODES,
            "ranks_per_node": RANKS_PER_NODE,
            "model": options.model,
            "optimizer": OPTIMIZER,
            "warmup_steps": WARMUP_STEPS,
            "samples_per_rank": SAMPLES_PER_RANK,
            "tokens_per_point": options.tokens_per_point,
            "held_out_samples": HELD_OUT_SAMPLES,
            "text_sha256": hashlib.sha256(self._text.read_bytes()).hexdigest(),
        }
        self.record = Record(options.output, subject, origin("time_to_loss", arguments))

    def losses(self, session: Session) -> None:
        for setting in self._settings:
            for learning_rate in self._options.learning_rates or setting.learning_rates:
                self._train(session, setting, learning_rate, UNLIMITED)

    def whole(self, session: Session) -> None:
        slowest = min(self._rates)
        for name in (name for name in self._options.whole if name in self._options.settings):
            best = self.record.best_curve(name)
            self._train(session, SETTINGS[name], best.learning_rate, slowest)

    def _train(self, session: Session, setting: Setting, learning_rate: float, rate: Rate) -> None:
        interval = self._options.tokens_per_point // (self.world.tokens_per_step * setting.batch)
        last = setting.length * self._options.tokens // (self.world.tokens_per_step * setting.batch)
        if self.record.has_curve(setting.name, learning_rate, rate, last):
            return
        session.network.hold(UNLIMITED)
        session.build_on_text(setting.name, setting.training_flags(self.world, learning_rate), self._text, HELD_OUT_SAMPLES)
        curve = Curve(setting.name, learning_rate, str(rate), [0], [session.evaluate(setting.name)], [0.0])
        while curve.steps[-1] < last:
            session.network.hold(rate)
            measured = session.run_steps(setting.name, interval)
            session.network.hold(UNLIMITED)  # the loss is not timed
            curve.steps.append(curve.steps[-1] + interval)
            curve.losses.append(session.evaluate(setting.name))
            curve.seconds.append(curve.seconds[-1] + measured.seconds * interval)
            print(f"{setting.name}, rate {learning_rate}, {rate}: step {curve.steps[-1]}, loss {curve.losses[-1]:.4f}", flush=True)
        session.drop(setting.name)
        self.record.add_curve(curve)

    def seconds(self, session: Session) -> None:
        wanted = {timed.name: timed for setting in self._settings for timed in setting.timed(self.world)}
        for number, timed in itertools.product(range(self._options.rounds), wanted.values()):
            missing = [rate for rate in self._rates if self.record.rounds(rate, timed.name) <= number]
            if not missing:
                continue
            session.network.hold(UNLIMITED)
            session.build(timed.name, timed.flags)
            for rate in missing:
                session.network.hold(rate)
                measured = session.run(timed.name, self._options.seconds, multiple=timed.period)
                self.record.add_seconds(rate, timed.name, measured.seconds)
                print(f"{rate}: {timed.name} {measured.seconds:.2f} s per step", flush=True)
            session.network.hold(UNLIMITED)
            session.drop(timed.name)


def _part(word: str) -> str:
    """A part by its name. `choices` would refuse the default, which is all of them."""
    if word not in PARTS:
        raise argparse.ArgumentTypeError(f"{word} is none of {', '.join(PARTS)}")
    return word


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("parts", nargs="*", type=_part, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=", ".join(SETTINGS))
    parser.add_argument("--learning-rates", nargs="+", type=float, metavar="RATE", help="instead of those that each setting names")
    parser.add_argument(
        "--whole",
        nargs="+",
        choices=SETTINGS,
        default=WHOLE,
        metavar="NAME",
        help="of whole runs at the lowest rate, if they are in --settings",
    )
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help="of every node's link (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the shortest runs (default: %(default)s)")
    parser.add_argument("--tokens-per-point", type=int, default=TOKENS_PER_POINT, help="between evaluations (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timed steps, about (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of timed steps; the fastest counts (default: %(default)s)")
    parser.add_argument("--model", default=MODEL, metavar="FLAGS", help="of the training script (default: %(default)s)")
    parser.add_argument("--work-dir", default="runs/loss_parity", help="for the text")
    parser.add_argument("--output", type=Path, help="the outcomes (default: runs/time_to_loss.json)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two rates, two points")
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE)
    if options.output is None:
        options.output = ROOT / "runs" / ("smoke_time_to_loss.json" if options.smoke else "time_to_loss.json")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
