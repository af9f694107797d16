"""How the tools of this folder run: a user's mistake ends in one line and exit code 2."""

import argparse
from collections.abc import Callable

MISTAKE_EXIT_CODE = 2


def run_command(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    """Parses the command line and runs; a ValueError or OSError of `run` becomes the error line of the tool."""
    args = parser.parse_args()
    try:
        run(args)
    except (ValueError, OSError) as error:
        parser.exit(MISTAKE_EXIT_CODE, f"{parser.prog}: error: {error}\n")
