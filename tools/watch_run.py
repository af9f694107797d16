"""Follows running jobs in a terminal: losses as a picture, progress, speed, bytes per link and warnings, from the files of --log-jsonl."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from cli.command import printable, run_command
from run_logs.braille import BLANK
from run_logs.followed_run import FollowedRun
from run_logs.history import AXES, Axis, run_names
from run_logs.view import Screen, frame, silence, status

CLEAR = "\x1b[H\x1b[2J"
REFRESH_SECONDS = 2.0


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Shows the runs until the last one ends, or once. Raises UserError for a wrong number of names, and for a file that is not a log."""
    names = run_names(args.log_jsonl, args.names)
    runs = [FollowedRun(Path(path), name) for path, name in zip(args.log_jsonl, names, strict=True)]
    axis = AXES[args.x_axis]
    try:
        if args.once:
            for followed in runs:
                followed.read_on()
            print(frame(runs, axis, screen_of(sys.stdout), time.time()), flush=True)
        else:
            follow(runs, axis, sys.stdout, lambda: time.sleep(REFRESH_SECONDS), time.time)
    except KeyboardInterrupt:
        print()


def follow(runs: Sequence[FollowedRun], axis: Axis, output: TextIO, pause: Callable[[], None], now: Callable[[], float]) -> None:
    """Shows the runs again and again, until all have logged their last iteration.

    Away from a terminal, and on one that knows no control sequences, it prints a line when a log has grown. pause: waits between two looks.
    """
    is_first, silent = True, set[FollowedRun]()
    while True:
        grown = [followed.read_on() for followed in runs]
        if _has_cursor(output):
            output.write(CLEAR + frame(runs, axis, screen_of(output), now()) + "\n")
        else:
            for followed, has_grown in zip(runs, grown, strict=True):
                if has_grown or is_first:
                    output.write(printable(status(followed)) + "\n")
                warning = silence(followed, now())
                if warning and followed not in silent:
                    output.write(printable(followed.name) + warning + "\n")
                (silent.add if warning else silent.discard)(followed)
        is_first = False
        output.flush()
        if all(followed.is_finished for followed in runs):
            return
        pause()


def screen_of(output: TextIO) -> Screen:
    """What the terminal or file of this stream can show. NO_COLOR is honoured as on no-color.org."""
    columns, rows = shutil.get_terminal_size((80, 24))
    has_colour = _has_cursor(output) and not os.environ.get("NO_COLOR")
    return Screen(max(20, columns), max(8, rows), has_colour, _has_unicode(output))


def _has_unicode(output: TextIO) -> bool:
    """Whether the encoding of the output has braille patterns, and the user's locale does not say that the terminal lacks them.

    In the locale C, Python writes UTF-8 all the same.
    """
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG")
    if sys.flags.utf8_mode and locale and "UTF" not in locale.upper():
        return False
    try:
        chr(BLANK).encode(output.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _has_cursor(output: TextIO) -> bool:
    """Whether this is a terminal that knows control sequences."""
    return output.isatty() and os.environ.get("TERM") != "dumb"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="watch_run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--log-jsonl", nargs="+", required=True, metavar="FILE", help="file of a run; it may not exist yet")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="what to call the runs (default: parts of the paths)")
    parser.add_argument(
        "--x-axis", choices=sorted(AXES), default="iteration", help="what the losses are drawn over, as in plot_run.py (default: iteration)"
    )
    parser.add_argument("--once", action="store_true", help="show what there is and end")
    return parser


if __name__ == "__main__":
    main()
