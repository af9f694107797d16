"""How every tool ends that cannot do its work: one line that says what to do, and an exit code that is not 0."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import train_tokenizer
from cli import command
from harness.interrupts import heed_interrupts
from harness.places import ROOT
from harness.tool import write_json_lines

from megatron_zpp.system.user_error import UserError


def ended(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a tool that calls `run`."""
    monkeypatch.setattr(sys, "argv", ["tool.py"])
    with pytest.raises(SystemExit) as end:
        command.run_command(argparse.ArgumentParser(prog="tool.py"), lambda _: run())
    return end.value.code


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--max-new-token 3", "--max-new-token is not a flag of this tool; did you mean --max-new-tokens?"),
        ("--max_new_tokens=3", "--max_new_tokens is not a flag of this tool; did you mean --max-new-tokens?"),
        ("--colour", "--colour is not a flag of this tool; see --help for the list."),
        ("--max-new-tokens x", "argument --max-new-tokens: invalid int value: 'x'"),
        ("", "the following arguments are required: --max-new-tokens"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(capsys: pytest.CaptureFixture[str], words: str, line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parsed(parser_of_one_flag(), words.split())
    assert (ended.value.code, capsys.readouterr().err) == (2, f"tool.py: error: {line}\n")


def test_help_shows_the_usage_and_a_value_may_begin_like_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parsed(parser_of_one_flag(), ["--help"])
    assert capsys.readouterr().out.startswith("usage: tool.py [-h] --max-new-tokens")
    found = command.parsed(parser_of_one_flag(), ["--max-new-tokens", "3", "--prompt", "--and then"])
    assert (found.max_new_tokens, found.prompt) == (3, "--and then")


@pytest.mark.parametrize("words", [["--output=~/x"], ["--output", "~/x"]])
def test_the_home_folder_stands_in_for_its_sign_in_every_path_but_not_in_text(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="tool.py", allow_abbrev=False)
    parser.add_argument("--output")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--input", nargs="+")
    parser.add_argument("--prompt", type=command.text)
    more = ["--file=~/y", "--input", "~/a", "b~", "--prompt=~/x"]
    for found in (command.parsed(parser, [*words, *more]), command.parsed_with_flags_of_run(parser, [*words, *more])[0]):
        home = Path.home()
        assert (found.output, found.file, found.input, found.prompt) == (f"{home}/x", home / "y", [f"{home}/a", "b~"], "~/x")


def parser_of_one_flag() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tool.py", allow_abbrev=False)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--prompt")
    return parser


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("--a 1 is wrong; give 2."), 2, "error: --a 1 is wrong; give 2."),
        (UserError("f has \x1b[2J\x07.\nAnd \xe9."), 2, "error: f has ?[2J?.\nAnd \xe9."),
        (OSError(errno.ENOSPC, "No space left"), 2, "error: the output: No space left; free space there, or choose another place."),
        (OSError(errno.EDQUOT, "Over quota", "/x/y"), 2, "error: /x/y: Over quota; free space there, or choose another place."),
        (PermissionError(errno.EACCES, "Denied", "/x"), 2, "error: /x: Denied; correct the path, or its permissions."),
        (
            OSError(errno.EFBIG, "Too large", "/x"),
            2,
            "error: /x: Too large; allow larger files (ulimit -f), or choose another file system.",
        ),
        (OSError(errno.EMFILE, "Too many files"), 2, "error: the system: Too many files; allow more open files (ulimit -n)."),
        (OSError(errno.EAGAIN, "Not now", "/x"), 2, "error: /x: Not now; free memory, or allow more processes (ulimit -u)."),
        (
            BrokenPipeError(errno.EPIPE, "Broken"),
            2,
            "error: a pipe: Broken; the program that reads it has ended, so look for its own error.",
        ),
        (
            BrokenPipeError(errno.EPIPE, "Broken", "/x"),
            2,
            "error: /x: Broken; the program that reads it has ended, so look for its own error.",
        ),
        (OSError("a text of its own"), 2, "error: a text of its own"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_a_tool_that_fails_says_why_in_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(raising(error), monkeypatch) == code
    assert capsys.readouterr().err == f"tool.py: {line}\n"


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("print('x' * 10**6)", 141, b""),
        ("print('x')", 141, b""),
        ("print('x'); sys.exit(1)", 1, b""),
        ("print('x'); raise command.UserError('wrong')", 2, b"tool: error: wrong\n"),
        ("sys.stdout.reconfigure(write_through=True); print('x')", 141, b""),
    ],
)
def test_a_tool_whose_reader_has_left_says_nothing_about_that_and_keeps_its_exit_code(body: str, code: int, line: bytes) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = ended_process(body, write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (code, line)


@pytest.mark.parametrize(
    ("program", "library", "code"),
    [
        ("tools/inspect_checkpoint.py", "torch", -signal.SIGINT),
        ("tools/convert_to_hf.py", "torch", -signal.SIGINT),
        ("tools/generate_text.py", "torch", -signal.SIGINT),
        ("tools/inspect_dataset.py", "numpy", -signal.SIGINT),
        ("tools/train_tokenizer.py", "sentencepiece", -signal.SIGINT),
        ("pretrain_zeropp_gpt.py", "torch", 130),
    ],
)
def test_an_interruption_while_a_library_is_imported_is_one_line(tmp_path: Path, program: str, library: str, code: int) -> None:
    (tmp_path / f"{library}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 1".split()
    words = [sys.executable, ROOT / program, *flags]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, preexec_fn=heed_interrupts)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{Path(program).name}: interrupted\n")


def test_a_tool_without_standard_output_runs() -> None:
    done = ended_process("print('x')", None)
    assert (done.returncode, done.stderr) == (0, b"")


def ended_process(body: str, output: int | None) -> subprocess.CompletedProcess[bytes]:
    """A tool of this body in a process of its own, with buffers. output: its standard output; None for none."""
    imports = "import argparse, sys; from cli import command"
    program = f"def run(_):\n    {body}\n{imports}; command.run_command(argparse.ArgumentParser(prog='tool'), run)"
    words = [sys.executable, "-c", program]
    if output is None:
        words = ["bash", "-c", f"exec {shlex.join(words)} >&-"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(words, cwd=ROOT / "tools", env=environment, stdout=output, stderr=subprocess.PIPE, check=False)


def test_a_tokenizer_that_cannot_be_put_in_place_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_json_lines(tmp_path / "corpus.jsonl", [{"text": "a text to learn from, again and again"}] * 20)
    (tmp_path / "t.model").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", lambda *_: raising(OSError(errno.ENOSPC, "No space left"))())
    words = ["--input", str(corpus), "--model-prefix", str(tmp_path / "t"), "--vocab-size", "280"]
    with pytest.raises(OSError, match="No space left"):
        train_tokenizer.run(train_tokenizer._parser().parse_args(words))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "t.model"]
    assert (tmp_path / "t.model").read_bytes() == b"old"


def test_text_in_bytes_that_the_locale_does_not_know_is_taken_as_utf_8() -> None:
    assert command.text("gr\xf6\xdfe \U0001f600") == "gr\xf6\xdfe \U0001f600"
    assert command.text("gr\udcc3\udcb6") == "gr\xf6"
    with pytest.raises(argparse.ArgumentTypeError, match="is not UTF-8 text"):
        command.text("gr\udcf6")


def test_characters_that_the_output_lacks_are_printed_as_escapes_by_every_tool() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "build_data_cache.py", "--data-path", "/nowhere/Gr\xf6\xdfe", "--seq-length", "8", "--train-iters", "1"]
    done = subprocess.run(words, cwd=ROOT / "tools", env=environment, capture_output=True, check=False)
    assert done.returncode == 2 and b"Traceback" not in done.stderr, done.stderr
