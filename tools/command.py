"""Runs the tools of this folder. A user's mistake prints one line and ends with exit code 2."""

import argparse
from collections.abc import Callable

MISTAKE_EXIT_CODE = 2


def run_command(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    """Parses the command line and calls `run`. A ValueError or OSError of `run` becomes the error line of the tool."""
    args = parser.parse_args()
    try:
        run(args)
    except (ValueError, OSError) as error:
        parser.exit(MISTAKE_EXIT_CODE, f"{parser.prog}: error: {error}\n")


ELEMENT_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose the checkpoint to read."""
    parser.add_argument("--load", required=True, metavar="DIR", help="folder that --save of the training named")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the folder, dtype and file size of written weights."""
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder to write")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_TYPES), default="float32", help="of the weights written (default: float32)")
    parser.add_argument(
        "--max-shard-size", dest="max_shard_bytes", type=_gigabytes, default=_gigabytes("5"), metavar="GB", help="of one file (default: 5)"
    )


def _gigabytes(text: str) -> int:
    """Gigabytes in bytes. Raises ArgumentTypeError unless the text is a positive number."""
    try:
        nbytes = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of gigabytes")
    return nbytes
