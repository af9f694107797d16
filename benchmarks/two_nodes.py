"""Trains over a real, slow network on one machine: our ZeRO-3 and ZeRO++ beside FSDP2, at several rates of the link.

    python -m benchmarks.two_nodes                          # 2 nodes x 2 ranks, 5 rates chosen from the step time without limit
    python -m benchmarks.two_nodes --nodes 4 --rate unlimited 500mbit 100mbit
    python -m benchmarks.two_nodes --peers fsdp2 deepspeed  # with DeepSpeed's ZeRO-3, if it is installed
    python -m benchmarks.two_nodes --smoke                  # tests in under a minute that all works; its figures mean nothing

Nodes are network namespaces, each connected to a bridge by a link that a token bucket limits to a rate in both directions. All
configurations live in the same processes and take turns in every round. Needs root or unprivileged user namespaces, and the commands ip
and tc. Nothing is left behind, however it ends: the network belongs to this process and its ranks, which end with it.

Writes OUTPUT.json round by round, OUTPUT.md and OUTPUT.png. If it is interrupted, the same command continues.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report import ROOT, origin
from benchmarks.slow_links.analysis import analyse
from benchmarks.slow_links.chart import draw
from benchmarks.slow_links.configurations import DEFAULT_MODEL, OURS, PEERS, SMOKE_MODEL, Workload
from benchmarks.slow_links.measurement import Plan, measure, smallest_hop
from benchmarks.slow_links.peers import peers_named
from benchmarks.slow_links.program import end_by_exceptions, exit_code_of
from benchmarks.slow_links.record import Record
from benchmarks.slow_links.report import markdown
from benchmarks.slow_links.session import Session
from testbed.rates import Rate
from testbed.sandbox import enter_own_network

SMOKE = {"model": SMOKE_MODEL, "rate": ["unlimited", "200mbit"], "rounds": 1, "seconds": 0.5}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    return exit_code_of("two_nodes.py", lambda: _run(options, arguments))


def _run(options: argparse.Namespace, arguments: list[str]) -> None:
    workload = Workload(
        options.nodes, options.ranks_per_node, options.model, options.micro_batch_size, options.gradient_accumulation, options.flags.split()
    )
    rates = None if options.rate == ["auto"] else [Rate.parse(text) for text in options.rate]
    smallest_hop(workload)
    record = Record(options.output.with_suffix(".json"), _subject(workload, options), starts_anew=options.fresh)
    if not options.report_only:
        names = [*peers_named(options.peers), *OURS]
        record.check_configurations(names)
        enter_own_network(["-m", "benchmarks.two_nodes", *arguments])
        _measure(workload, Plan(names, rates, options.rounds, options.seconds, options.profile), record, arguments)
    _report(record, workload, options.output)


def _measure(workload: Workload, plan: Plan, record: Record, arguments: list[str]) -> None:
    end_by_exceptions()
    record.made_by(origin("two_nodes", arguments))
    session = Session(workload, plan.names)
    try:
        record.note("deepspeed", session.machine["deepspeed"])
        measure(session, workload, plan, record)
        session.end()
    finally:
        session.close()


def _report(record: Record, workload: Workload, output: Path) -> None:
    ratings = analyse(record, workload)
    if not ratings:
        raise ValueError(f"{output.with_suffix('.json')} holds no finished round; measure first.")
    text = markdown(record, workload, ratings)
    output.with_suffix(".md").write_text(text)
    draw(ratings, workload, output.with_suffix(".png"))
    print(f"\n{text}\n{output.with_suffix('.json')}, .md, .png")


def _subject(workload: Workload, options: argparse.Namespace) -> dict[str, object]:
    return {
        "nodes": workload.nodes,
        "ranks_per_node": workload.ranks_per_node,
        "model": workload.model,
        "micro_batch_size": workload.micro_batch_size,
        "gradient_accumulation": workload.microbatches,
        "flags": workload.extra,
        "profile": options.profile,
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument(
        "--rate",
        nargs="+",
        default=["auto"],
        metavar="RATE",
        help="of every node's link, such as 200mbit or unlimited; auto (the default): without limit, and four rates chosen after it",
    )
    parser.add_argument("--rounds", type=int, default=5, help="per rate (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="that one configuration runs in one round, about (default: %(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="FLAGS", help="of the training script (default: %(default)s)")
    parser.add_argument("--flags", default="", metavar="FLAGS", help="more flags of the training script, for our configurations")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--gradient-accumulation", type=int, default=1, metavar="K", help="micro-batches per step (default: %(default)s)")
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=["fsdp2"], metavar="PEER", help=f"of {', '.join(PEERS)} (default: fsdp2 alone)"
    )
    parser.add_argument("--profile", action="store_true", help="also count collectives, and time codecs and waits, on rank 0")
    parser.add_argument(
        "--output", type=Path, metavar="STEM", help="files to write, without suffix (default: runs/two_nodes_2x2, by the world)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the rounds that OUTPUT.json holds")
    parser.add_argument("--report-only", action="store_true", help="measure nothing; write the tables and the chart again")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two rates, one round")
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE, fresh=not options.report_only)
    for name in ("nodes", "ranks_per_node", "rounds", "micro_batch_size", "gradient_accumulation"):
        if getattr(options, name) < (2 if name == "nodes" else 1):
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is too small")
    if options.output is None:
        # Not the folder of stored results: rounds of this machine would be added to those of another.
        folder = ROOT / "runs" / ("smoke" if options.smoke else "")
        accumulation = f"_k{options.gradient_accumulation}" if options.gradient_accumulation > 1 else ""
        peers = "" if options.peers == ["fsdp2"] else "_deepspeed"
        options.output = folder / f"two_nodes_{options.nodes}x{options.ranks_per_node}{accumulation}{peers}"
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
