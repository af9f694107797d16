"""Runs the tools of the folder above. A user's mistake prints one line and ends with exit code 2."""

import argparse
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from megatron_zpp.config.cli import nearest_flag
from megatron_zpp.config.flag import LARGEST_COUNT, LARGEST_PROCESSES, LARGEST_VOCABULARY, LARGEST_WORLD, whole_number
from megatron_zpp.data.preprocess.json_lines import LONGEST_LINE_BYTES
from megatron_zpp.system.user_error import UserError

MISTAKE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
CLOSED_PIPE_EXIT_CODE = 141
STANDARD_OUTPUT = 1  # its file descriptor
LIMITS = {  # of the system, with their remedies
    errno.EFBIG: "allow larger files (ulimit -f), or choose another file system",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    **dict.fromkeys((errno.EAGAIN, errno.ENOMEM), "free memory, or allow more processes (ulimit -u)"),
}


def _end_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints one line in place of a traceback for Ctrl-C outside of `errors_in_words`."""
    if issubclass(kind, KeyboardInterrupt):
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _end_in_one_line  # at once, because the tool may go on to import torch, which takes seconds


def run_command(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None]) -> None:
    """Parses the command line and calls `run`. See `errors_in_words`."""
    args = parsed(parser, sys.argv[1:])
    with errors_in_words(parser):
        run(args)


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The command line. A mistake ends the program with one line, without the usage, and an unknown flag is named first."""
    _show_usage_for_help_only(parser, words)
    before_end = list(words)[: list(words).index("--")] if "--" in words else words  # what follows are values
    flags = [word.partition("=")[0] for word in before_end if word.startswith("--") and " " not in word]  # argparse takes others as values
    unknown = [flag for flag in flags if flag not in parser._option_string_actions]
    takes_others = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    if unknown and not takes_others:
        parser.error(f"{unknown[0]} is not a flag of this tool; {_remedy_of_unknown(unknown[0], list(parser._option_string_actions))}")
    return _with_home(parser, parser.parse_args(words))


def parsed_with_flags_of_run(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of a tool, and all flags that are not its own, which are those of the training script."""
    _show_usage_for_help_only(parser, words)
    options, others = parser.parse_known_args(words)
    return _with_home(parser, options), others


def _with_home(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """The options with the home folder in place of ~, which a shell does not replace in --output=~/x."""
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.type in (None, Path) and action.nargs != argparse.REMAINDER:
            setattr(options, action.dest, [_in_home(word) for word in value] if isinstance(value, list) else _in_home(value))
    return options


def _in_home(value: Any) -> Any:
    return type(value)(os.path.expanduser(value)) if isinstance(value, str | Path) else value


def _show_usage_for_help_only(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Keeps argparse from printing the usage, of up to 40 lines, above the line about a mistake."""
    if not {"-h", "--help"}.intersection(words):
        parser.usage = argparse.SUPPRESS


def _remedy_of_unknown(flag: str, known: Sequence[str]) -> str:
    nearest = nearest_flag(flag, known)
    return f"did you mean {nearest}?" if nearest is not None else "see --help for the list."


@contextmanager
def errors_in_words(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the program with one line for a UserError, an OSError or an interruption of the block; silently if nobody reads its output.

    Characters that the encoding of standard output lacks are printed as escapes such as \\xe9.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        print(end="", flush=True)
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _output_has_no_reader():
            parser.exit(CLOSED_PIPE_EXIT_CODE)
        sentence = "\n".join(map(printable, in_words(error).split("\n")))  # it may quote a file
        parser.exit(MISTAKE_EXIT_CODE, f"{parser.prog}: error: {sentence}\n")
    except KeyboardInterrupt as interruption:
        parser.exit(INTERRUPTED_EXIT_CODE, f"{parser.prog}: interrupted{interruption}\n")
    finally:
        _end_output()


def _output_has_no_reader() -> bool:
    """Whether standard output is a pipe or a socket whose other end is closed."""
    poll = select.poll()
    poll.register(STANDARD_OUTPUT, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _end_output() -> None:
    """Writes what is still buffered, or drops it if nobody can take it: the interpreter would report that, and change the exit code."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_words(error: UserError | OSError) -> str:
    """The sentence of an error; for one of the system its file, what is wrong, and what to do."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.errno in LIMITS:
        return f"{error.filename or 'the system'}: {error.strerror}; {LIMITS[error.errno]}."
    if error.errno == errno.EPIPE:
        return f"{error.filename or 'a pipe'}: {error.strerror}; the program that reads it has ended, so look for its own error."
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space there, or choose another place" if is_full else "correct the path, or its permissions"
    return f"{error.filename or 'the output'}: {error.strerror}; {remedy}."


def printable(text: str) -> str:
    """The text with a question mark for every character that a terminal would not show as one, such as the start of a control sequence."""
    return "".join(character if character.isprintable() else "?" for character in text)


def number_within(smallest: int, largest: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number in this range, spelled in plain digits."""

    def number_of(text: str) -> int:
        number = whole_number(text)
        if number is None or not smallest <= number <= largest:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {smallest} to {largest}")
        return number

    return number_of


count_from_0 = number_within(0, LARGEST_COUNT)
count_from_1 = number_within(1, LARGEST_COUNT)
process_count = number_within(1, LARGEST_PROCESSES)
vocabulary_size = number_within(1, LARGEST_VOCABULARY)
rank_count = number_within(1, LARGEST_WORLD)


def text(argument: str) -> str:
    """The type of an argument that is text. Bytes that the locale does not know are taken as UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(argument).decode("utf-8")
        except UnicodeDecodeError:
            raise argparse.ArgumentTypeError(f"{argument!a} is not UTF-8 text") from None
    return argument


LARGEST_MEGABYTES = 1e12
ELEMENT_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose the checkpoint to read."""
    parser.add_argument(
        "--load",
        required=True,
        nargs="+",
        type=Path,
        metavar="DIR",
        help="folder that --save of the training named, or those of several nodes",
    )
    parser.add_argument("--ckpt-step", type=count_from_0, metavar="N", help="iteration of the checkpoint (default: the latest)")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the folder, dtype and file size of written weights."""
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder to write")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_TYPES), default="float32", help="of the weights written (default: float32)")
    parser.add_argument(
        "--max-shard-size", dest="max_shard_bytes", type=_gigabytes, default=_gigabytes("5"), metavar="GB", help="of one file (default: 5)"
    )


def add_line_limit(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the flag that limits the memory of a line of text."""
    parser.add_argument(
        "--max-line-megabytes",
        dest="longest_line_bytes",
        type=_megabytes_in_bytes,
        default=LONGEST_LINE_BYTES,
        metavar="MB",
        help=f"refuse a longer line, which has to fit in memory (default: {LONGEST_LINE_BYTES // 10**6})",
    )


def _megabytes_in_bytes(text: str) -> int:
    return int(megabytes(text) * 1e6)


def megabytes(text: str) -> float:
    """The type of an argument of megabytes: a positive number, at most a million million."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= LARGEST_MEGABYTES:
        raise argparse.ArgumentTypeError(f"{text} is not a number of megabytes above 0 and at most {LARGEST_MEGABYTES:g}")
    return number


def _gigabytes(text: str) -> int:
    """Gigabytes in bytes. Raises ArgumentTypeError unless the text is a positive number."""
    try:
        nbytes = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of gigabytes")
    return nbytes
