"""The table and the picture of a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.loss_study.gaps import Gap, Interval

PLAIN_BYTES_IN_M = 3  # plain ZeRO-3 with one micro-batch: weights climb twice, gradients descend once


def table(gaps: Sequence[Gap]) -> str:
    """A Markdown table, one row per setting."""
    lines = [
        "| setting | bytes between nodes, M | validation loss | gap, % | gap of the main weights, % | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for gap in gaps:
        cells = "- | -" if gap.setting.is_plain else f"{Interval.of(gap.percents)} | {Interval.of(gap.exported)}"
        # The study averages moments in the memory of its process: their bytes are not counted.
        in_m = "" if gap.setting.averages_moments else f"{PLAIN_BYTES_IN_M * gap.share:.3f}"
        lines.append(f"| {gap.setting.name} | {in_m} | {gap.mean_loss:.4f} | {cells} | {len(gap.percents)} |")
    return "\n".join(lines)


def draw(gaps: Sequence[Gap], path: Path) -> None:
    """Draws every setting's gap: a dot per seed, and a line at the mean with its 95 % interval."""
    from matplotlib.figure import Figure

    shown = [gap for gap in gaps if not gap.setting.is_plain]
    figure = Figure(figsize=(10, 0.4 * len(shown) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    for row, gap in enumerate(shown):
        interval = Interval.of(gap.percents)
        axes.plot(gap.percents, [row] * len(gap.percents), "o", color="tab:blue", alpha=0.4, markersize=4)
        axes.errorbar(interval.mean, row, xerr=interval.half, fmt="|", color="tab:red", markersize=12, capsize=4)
    axes.axvline(0.0, color="gray", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [gap.setting.name for gap in shown])
    axes.invert_yaxis()
    axes.set_xlabel("gap to ZeRO-3 in validation loss, % (dots: seeds; red: mean, 95 % interval)")
    figure.savefig(path, dpi=150)
