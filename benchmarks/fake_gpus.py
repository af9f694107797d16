"""Runs a command with fake GPUs, which compute nothing: torch's dispatch, allocator, streams and NCCL groups run as with real ones.

    python -m benchmarks.fake_gpus --gpus 4 COMMAND

Needs torch built for CUDA 13 and CUDA's toolkit, and no GPU. Every number on a fake GPU is zero, so losses are zero, too. cuDNN is one of
an old version, so that --attention-backend auto takes flash; --attention-backend fused does not work.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.fake_gpu.libraries import fake_gpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs (default: %(default)s)")
    parser.add_argument("--gibibytes", type=int, default=80, help="memory of each (default: %(default)s)")
    parser.add_argument("--capability", default="9.0", help="compute capability (default: %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments")
    options = parser.parse_args()
    if not options.command:
        parser.error("no command is given; write one behind the flags.")
    try:
        variables = fake_gpus(options.gpus, options.gibibytes, options.capability)
    except ValueError as error:
        parser.error(str(error))
    os.environ.update(variables)
    os.environ.setdefault("PYTHON", sys.executable)  # for scripts that start Python
    try:
        os.execvp(options.command[0], options.command)
    except OSError as error:
        parser.error(f"{options.command[0]} cannot be run: {error.strerror}.")


if __name__ == "__main__":
    main()
