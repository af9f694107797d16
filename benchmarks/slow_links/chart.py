"""Draws the speedup over our ZeRO-3 against the rate of the link, one line per configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.slow_links.analysis import Rated
from benchmarks.slow_links.configurations import FSDP2, NAMES, SETS, ZERO3, Workload

COLOURS = dict(zip(NAMES, ("0.45", "C5", "C6", "C8", "0.0", "C0", "C1", "C2", "C3", "C4"), strict=True))


def draw(ratings: Sequence[Rated], workload: Workload, path: Path) -> None:
    """Writes a PNG. The unlimited rate is at the right end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    labels = [str(rated.rate) for rated in reversed(ratings)]
    for name in ratings[0].rows:
        axes.plot(
            labels,
            [rated.rows[name].over_zero3 for rated in reversed(ratings)],
            marker="o",
            label=name,
            color=COLOURS[name],
            linewidth=2.2 if name in (ZERO3, *SETS) else 1.3,
        )
    modelled = [rated.rows[ZERO3].seconds.median / rated.fsdp2_3m_seconds for rated in reversed(ratings)]
    axes.plot(labels, modelled, marker=".", linestyle=":", color=COLOURS[FSDP2], label="FSDP2 if it moved 3M (modelled)")
    for name in (name for name in SETS if name in ratings[0].rows):
        allowed = [rated.rows[name].allowed or 1.0 for rated in reversed(ratings)]
        axes.plot(labels, allowed, linestyle="--", linewidth=1, color=COLOURS[name], label=f"{name}: what fewer bytes alone allow")
    axes.set_xlabel("rate of a node's link, each direction")
    axes.set_ylabel("speedup over our ZeRO-3")
    axes.set_title(f"{workload.nodes} nodes x {workload.ranks_per_node} ranks, {workload.parameters / 1e6:.0f} million parameters")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
