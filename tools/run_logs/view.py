"""What a terminal shows of followed runs."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from cli.command import printable

from megatron_zpp.config.counted import counted
from run_logs.braille import BLANK
from run_logs.followed_run import FollowedRun
from run_logs.history import Axis
from run_logs.loss_chart import loss_chart

COLOURS = ("36", "33", "35", "32", "34", "31")
WARNING_COLOUR = "31"
LINKS = {
    "inter_node_bytes": "into a node from others",
    "intra_node_bytes": "into a rank in its node",
    "tensor_link_bytes": "over the tensor link",
    "context_link_bytes": "over the context link",
}
FEWEST_ROWS, MOST_ROWS = 6, 30


@dataclass(frozen=True)
class Screen:
    """What a terminal can show. has_unicode: whether it has braille patterns."""

    columns: int
    rows: int
    has_colour: bool
    has_unicode: bool

    def paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self.has_colour else text

    def paint_curve(self, character: str, ink: int) -> str:
        if not self.has_unicode and ord(character) > BLANK:
            character = "*"
        return self.paint(character, COLOURS[ink % len(COLOURS)])


def frame(runs: Sequence[FollowedRun], axis: Axis, screen: Screen, now: float) -> str:
    """The losses of all runs in one picture, and under it some lines about each. now: seconds since the epoch."""
    below = _below(runs, screen, now, has_details=True)
    if len(below) + FEWEST_ROWS >= screen.rows:
        below = _below(runs, screen, now, has_details=False)
    rows = min(MOST_ROWS, max(FEWEST_ROWS, screen.rows - len(below) - 1))
    chart = loss_chart([run.history for run in runs], axis, screen.columns - 1, rows, screen.paint_curve)
    if not screen.has_unicode:
        chart = [line.replace(chr(BLANK), " ") for line in chart]
    return "\n".join([*chart, *below])


def _below(runs: Sequence[FollowedRun], screen: Screen, now: float, *, has_details: bool) -> list[str]:
    found: list[str] = []
    for index, run in enumerate(runs):
        number = f"{index + 1} " if len(runs) > 1 else ""
        found += [screen.paint(line, COLOURS[index % len(COLOURS)]) for line in _wrapped(f"{number}{status(run)}", screen)]
        found += [part for line in details(run) if has_details for part in _wrapped(line, screen)]
        found += [screen.paint(line, WARNING_COLOUR) for line in _wrapped(silence(run, now), screen)]
    return found


def _wrapped(line: str, screen: Screen) -> list[str]:
    return textwrap.wrap(printable(line), screen.columns - 1, subsequent_indent="    ")


def status(run: FollowedRun) -> str:
    """One line: how far the run is, its losses, how many updates it skipped, and when it will end."""
    if not run.is_there:
        return f"{run.name}: no such file yet"
    history = run.history
    unreadable = [counted(run.unusable_lines, "unreadable line")] if run.unusable_lines else []
    if not history.iterations:
        return ", ".join([f"{run.name}: nothing logged yet", *unreadable])
    last, left = history.latest("train_iters"), history.latest("eta_seconds")
    parts = [f"iteration {history.iterations[-1]}" + (f" of {last:.0f}" if last is not None else "")]
    parts.append(f"loss {history.last_loss:.4f}")
    parts += [
        f"validation{f' {name}' if name else ''} {points[-1][1]:.4f} at {points[-1][0]}"
        for name, points in history.validations.items()
        if points
    ]
    if skipped := history.total("skipped_iterations"):
        parts.append(f"{skipped:.0f} skipped")
    if history.repetitions:
        parts.append(f"steps repeated {counted(history.repetitions, 'time')}")
    parts += unreadable
    if left is not None and not run.is_finished:
        parts.append(f"{duration(left)} left")
    return f"{run.name}: {', '.join(parts)}"


def details(run: FollowedRun) -> list[str]:
    """Lines about speed and bytes of the latest step, as far as they are logged."""
    latest = run.history.latest
    tokens, teraflops = latest("tokens_per_second"), latest("model_tflops_per_gpu")
    speed = [] if tokens is None else [f"{tokens:.0f} tokens/s"]
    if teraflops is not None:
        speed.append(f"{teraflops:.3g} TFLOP/s per rank")
    traffic = [f"{nbytes / 1e6:.2f} MB {words}" for key, words in LINKS.items() if (nbytes := latest(key))]
    lines = [", ".join(speed), f"per step {', '.join(traffic)}" if traffic else ""]
    return [f"  {line}" for line in lines if line]


def silence(run: FollowedRun, now: float) -> str:
    """A warning if the log has not grown for long; else empty. now: seconds since the epoch."""
    seconds = run.silent_seconds(now)
    return f"  WARNING: the log has not grown for {duration(seconds)}, far longer than between its last lines" if seconds else ""


def duration(seconds: float) -> str:
    """`1d 2h 3m 4s`, without leading units that are 0."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    parts = [(days, "d"), (hour, "h"), (minute, "m"), (second, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count}{unit}" for count, unit in parts[first:])
