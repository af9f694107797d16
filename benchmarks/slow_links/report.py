"""Formats the measurement as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.report import commands_of, in_table, machine_text
from benchmarks.slow_links.analysis import Rated, Row
from benchmarks.slow_links.configurations import DEEPSPEEDS, SETS, ZERO3, Workload
from benchmarks.slow_links.prediction import Known, Prediction
from benchmarks.slow_links.record import Record
from testbed.rates import UNLIMITED

MEGABYTE = 1e6
LANES = ("inter-climb", "intra-climb", "intra-descend", "inter-descend")


def markdown(record: Record, workload: Workload, ratings: Sequence[Rated]) -> str:
    """The facts about world and machine, then all tables."""
    blocks = [_facts(record, workload)]
    blocks += [_table_of(rated) for rated in ratings]
    known = Known({rated.rate: rated.rows[ZERO3].seconds.median for rated in ratings}, record.content["machine"]["cores"])
    if UNLIMITED in known.seconds:
        blocks.append(_predictions(ratings, Prediction(workload, known), known))
    if any(row.hidden for rated in ratings for row in rated.rows.values()):
        blocks.append(_hidden(ratings))
    return "\n\n".join(blocks) + "\n"


def _facts(record: Record, workload: Workload) -> str:
    notes = record.content["notes"]
    lines = [
        f"{workload.nodes} nodes x {workload.ranks_per_node} ranks, {workload.parameters / 1e6:.1f} million parameters, "
        f"{workload.microbatches} micro-batch{'es' if workload.microbatches > 1 else ''} per step, "
        f"{workload.tokens_per_step} tokens per step; {machine_text(record.content)}",
        "",
        *(f"    {command}" for command in commands_of(record.content)),
        "",
        f"A collective inside a node put {notes.get('intra_node_leak_bytes')} bytes on its link. The smallest hop between nodes of a unit "
        f"that matters brings {notes.get('smallest_hop_bytes')} bytes into one; after a pause they went at:",
        "",
    ]
    for name, achieved in notes.items():
        if name.startswith("achieved at "):
            rates = ", ".join(f"{nbytes} at {rate / 1e6:.4g} mbit" for nbytes, rate in achieved.items())
            lines.append(f"- {name.removeprefix('achieved at ')}: {rates}")
    if any(name in rounds[0] for rounds in record.content["rates"].values() for name in DEEPSPEEDS):
        lines += ["", f"DeepSpeed {notes.get('deepspeed')} runs without the quantization of its ZeRO++, which has no code for a CPU."]
    return "\n".join(lines)


def _spread(row: Row) -> str:
    return f"{row.seconds.median * 1e3:.0f} ({row.seconds.least * 1e3:.0f} to {row.seconds.most * 1e3:.0f})"


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "step, ms (least to most)": _spread,
    "tokens/s": lambda row: f"{row.tokens_per_second:.0f}",
    "x ZeRO-3": lambda row: f"{row.over_zero3:.2f}",
    "x FSDP2": lambda row: f"{row.over_fsdp2:.2f}",
    "MB into a node: kernel": lambda row: f"{row.kernel_bytes / MEGABYTE:.2f}",
    "in M (N - 1)/N": lambda row: f"{row.in_models:.2f}",
    "ledger": lambda row: _or_dash(row.ledger_bytes, lambda nbytes: f"{nbytes / MEGABYTE:.2f}"),
    "kernel over ledger": lambda row: _or_dash(row.kernel_over_ledger, lambda share: f"{share:+.2%}"),
    "x ZeRO-3 by bytes alone": lambda row: _or_dash(row.allowed, lambda allowed: f"{allowed:.2f}"),
    "reached": lambda row: _or_dash(row.reached, lambda share: f"{share:.0%}"),
}


def _table_of(rated: Rated) -> str:
    f = "" if rated.f is None else f": f = {rated.f:.2f} of ZeRO-3's step is the links'"
    header = ["", *COLUMNS]
    rows = [[row.name, *(cell(row) for cell in COLUMNS.values())] for row in rated.rows.values()]
    lines = [f"### {rated.rate}{f}", "", in_table(header, rows)]
    if rated.rate.is_limited:
        parts = [f"{name} over FSDP2, by part: {_parts(rated, name)}." for name in SETS if name in rated.rows]
        others = [f"{name} {rated.ring_seconds[name] * 1e3:.0f} ms" for name in DEEPSPEEDS if name in rated.rows]
        modelled = [f"Without gloo's extra bytes, modelled: {', '.join(others)}."] if others else []
        lines += ["", " ".join([f"FSDP2 with 3M, modelled: {rated.fsdp2_3m_seconds * 1e3:.0f} ms.", *modelled, *parts])]
    return "\n".join(lines)


def _parts(rated: Rated, name: str) -> str:
    gains = rated.gain_by_part(name)
    return f"{' x '.join(f'{gain:.2f} ({part})' for part, gain in gains.items())} = {_product(gains.values()):.2f}"


def _predictions(ratings: Sequence[Rated], prediction: Prediction, known: Known) -> str:
    names = [name for name in ratings[0].rows if prediction.covers(name)]
    rows = []
    for rated in ratings:
        cells = [str(rated.rate)]
        for name in names:
            measured, predicted = rated.rows[name].seconds.median, prediction.seconds(name, rated.rate)
            error = round(predicted / measured - 1, 2) + 0.0  # without the sign of a zero, which depends on the last bit
            cells.append(f"{predicted * 1e3:.0f} / {measured * 1e3:.0f} ({error:+.0%})")
        rows.append(cells)
    slowest = f" and at {known.slowest}" if known.slowest.is_limited else ""
    text = f"### Predicted by plans of tools/plan_run.py from ZeRO-3's step without limit{slowest}, beside the measured step, ms"
    return "\n".join([text, "", in_table(["", *names], rows), "", _errors(ratings, prediction, names, known)])


def _errors(ratings: Sequence[Rated], prediction: Prediction, names: Sequence[str], known: Known) -> str:
    """The errors of what predictions were not made from."""
    made_from = {(rate, ZERO3) for rate in (UNLIMITED, known.slowest)}
    sentences = []
    for kind, is_limited in (("without limit", False), ("at limited rates", True)):
        cells = [(rated.rate, rated.rows[name]) for rated in ratings if rated.rate.is_limited == is_limited for name in names]
        others = [(rate, row) for rate, row in cells if (rate, row.name) not in made_from]
        errors = [abs(prediction.seconds(row.name, rate) / row.seconds.median - 1) for rate, row in others]
        if errors:
            sentences.append(f"Mean error {kind} {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}.")
    return " ".join(sentences)


def _hidden(ratings: Sequence[Rated]) -> str:
    """A table of the time of rank 0's step that is not computation, in milliseconds."""
    rows = []
    for rated in ratings:
        for row in rated.rows.values():
            if row.hidden:
                codec = sum(seconds for kind, seconds in row.hidden.items() if kind.startswith(("encode", "decode")))
                waits = {kind.removeprefix("wait "): seconds for kind, seconds in row.hidden.items() if kind.startswith("wait")}
                lanes = [f"{waits.get(lane, 0.0) * 1e3:.0f}" for lane in LANES]
                rows.append([f"{rated.rate} {row.name}", f"{row.hidden.get('collectives', 0):.0f}", f"{codec * 1e3:.0f}", *lanes])
    header = ["", "collectives", "encode, decode, copy", *(f"wait {lane}" for lane in LANES)]
    return "\n".join(["### Inside a step of rank 0, ms", "", in_table(header, rows)])


def _product(factors: Iterable[float]) -> float:
    product = 1.0
    for factor in factors:
        product *= factor
    return product
