"""An interrupted preprocessing, when resumed, writes the same bytes as an uninterrupted one."""

import argparse
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import preprocess_data
import pytest
from cli.tokenizer_flags import tokenizer_identity
from harness.disk_events import disk_events
from harness.interrupts import heed_interrupts
from harness.patience import wait_until
from harness.places import ROOT
from harness.processes import children_of, is_alive
from harness.tool import write_json_lines
from harness.trained_tokenizers import write_gpt2_files

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.preprocess.corpus_builder import CorpusBuilder
from megatron_zpp.data.preprocess.indexed_writer import Extent, IndexedDatasetWriter
from megatron_zpp.data.preprocess.journal import Journal, Progress
from megatron_zpp.system.user_error import UserError

FLAGS = ["--json-keys", "text", "more", "--append-eod", "--skip-invalid", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


def digests(prefix: Path) -> dict[str, str]:
    """The finished files of a prefix. No other file of the prefix may exist."""
    return {path.name[len(prefix.name) :]: hashlib.sha256(path.read_bytes()).hexdigest() for path in prefix.parent.glob(f"{prefix.name}*")}


def write_source(folder: Path, documents: int, seed: int) -> list[Path]:
    """Two files with bad lines and empty documents among the others; the second is compressed."""
    rng = random.Random(seed)
    texts = [" ".join(str(rng.randrange(1000)) for _ in range(rng.choice([0, 3, 400]))) for _ in range(documents)]
    lines = [json.dumps({"text": text, "more": text[::-1] if rng.random() < 0.5 else ""}) for text in texts]
    lines = ["{" if rng.random() < 0.01 else line for line in lines]
    half = len(lines) // 2
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines[:half]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[half:]).encode(), compresslevel=1))
    return [folder / "a.jsonl", folder / "b.jsonl.gz"]


def command(sources: list[Path], prefix: Path, *arguments: str) -> list[str]:
    names = [str(source) for source in sources]
    return [sys.executable, "tools/preprocess_data.py", "--input", *names, "--output-prefix", str(prefix), *FLAGS, *arguments]


def start(sources: list[Path], prefix: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    words = command(sources, prefix, "--workers", "2", "--journal-interval", "0.02", *arguments)
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=heed_interrupts)


def wait_for(process: "subprocess.Popen[bytes]", path: Path, file_bytes: int) -> None:
    """Waits until the file has that many bytes, or until the process has ended."""
    while process.poll() is None and not (path.exists() and path.stat().st_size >= file_bytes):
        time.sleep(0.002)


def kill_and_resume(folder: Path, rounds: int, seed: int, *flags: str, documents: int = 9000) -> int:
    """The number of rounds that were killed in the middle of their work. flags: of another tokenizer than that of FLAGS."""
    sources = write_source(folder, documents=documents, seed=seed)
    whole = start(sources, folder / "whole", *flags)
    assert whole.communicate()[1].count(b"error") == 0
    expected, rng, killed = digests(folder / "whole"), random.Random(seed), 0
    assert len(expected) == 5
    whole_bytes = (folder / "whole_text_document.bin").stat().st_size
    for number in range(rounds):
        prefix = folder / f"out{number}"
        process = start(sources, prefix, *flags)
        wait_for(process, Path(f"{prefix}_text_document.bin.partial"), int(rng.uniform(0, 1) * whole_bytes))
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.communicate()
        killed += Path(f"{prefix}.unfinished").exists()
        resumed = start(sources, prefix, "--resume", *flags)
        assert resumed.communicate()[1].count(b"error") == 0
        assert digests(prefix) == expected
    return killed


def test_killed_twice_at_random_moments_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    assert kill_and_resume(tmp_path, 2, seed=5, documents=4000) >= 1


@pytest.mark.long
def test_killed_20_times_at_random_moments_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    assert kill_and_resume(tmp_path, 20, seed=20) >= 12


@pytest.mark.long
def test_with_a_tokenizer_that_remembers_words_it_goes_on_to_the_same_bytes_as_well(tmp_path: Path) -> None:
    vocabulary, merges = write_gpt2_files(tmp_path, 700)
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-size", "700", "--vocab-file", vocabulary, "--merge-file", merges]
    assert kill_and_resume(tmp_path, 20, 21, *flags) >= 12


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_worker_processes_end_with_a_tool_that_is_killed(tmp_path: Path) -> None:
    process = start(write_source(tmp_path, documents=8000, seed=3), tmp_path / "out")
    wait_until(lambda: len(children_of(process.pid)) == 2, "there are not two workers", pause_seconds=0.001)
    workers = children_of(process.pid)
    process.kill()
    process.communicate()
    assert len(workers) == 2
    wait_until(lambda: not any(map(is_alive, workers)), "a worker lives on")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_a_word_on_how_to_go_on(tmp_path: Path, signal_number: int) -> None:
    sources = write_source(tmp_path, documents=8000, seed=4)
    process = start(sources, tmp_path / "out", "--journal-interval", "3600")
    wait_for(process, tmp_path / "out_text_document.bin.partial", 200_000)
    process.send_signal(signal_number)
    errors = process.communicate()[1].decode()
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "preprocess_data.py: interrupted; the same command with --resume continues from there."
    journal = json.loads((tmp_path / "out.unfinished").read_text())
    assert journal["progress"]["text_bytes"] > 0


# The tests below call the tool's `run` with one worker in a fork, which ends at a chosen moment as if by SIGKILL.


def arguments(sources: list[Path], prefix: Path, *more: str) -> argparse.Namespace:
    return preprocess_data._parser().parse_args(command(sources, prefix, "--workers", "1", "--journal-interval", "0", *more)[2:])


def run_until_call(args: argparse.Namespace, last_call: int) -> bool:
    """Ends the run before its last_call-th change to names or disk. Returns whether it got that far."""
    child = os.fork()
    if child == 0:
        calls = iter(range(last_call))
        for name in ("replace", "remove", "fsync", "unlink", "open"):
            setattr(os, name, ending_instead(getattr(os, name), calls))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        preprocess_data.run(args)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def ending_instead(function: Callable[..., object], calls: Iterator[int]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        if next(calls, None) is None:
            os._exit(9)
        return function(*args, **kwargs)

    return call


def test_killed_at_any_change_to_the_disk_no_index_stands_beside_tokens_of_another_run_and_it_goes_on_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    sources = write_source(tmp_path, documents=30, seed=7)
    preprocess_data.run(arguments(sources, tmp_path / "whole"))
    expected = digests(tmp_path / "whole")
    assert "_skipped_lines.txt" in expected
    earlier, last_call = tmp_path / "earlier", 0
    earlier.mkdir()
    preprocess_data.run(arguments(sources[:1], earlier / "out"))
    of_runs = [digests(earlier / "out"), expected]
    seen = set[tuple[tuple[str, str], ...]]()
    while True:
        # Files of an earlier run exist, as if the corpus was made anew.
        prefix = Path(shutil.copytree(earlier, tmp_path / str(last_call))) / "out"
        if not run_until_call(arguments(sources, prefix), last_call):
            break
        last_call += 1
        left = digests(prefix)
        if (found := tuple(sorted(left.items()))) in seen:  # as between two calls that change no byte
            continue
        seen.add(found)
        for tokens, index in [(f"_{key}_document.bin", f"_{key}_document.idx") for key in ("text", "more")]:
            pair = (left.get(tokens), left.get(index))
            assert None in pair or pair in [(run[tokens], run[index]) for run in of_runs], last_call
        preprocess_data.run(arguments(sources, prefix, "--resume"))
        assert digests(prefix) == expected, last_call
    assert last_call > 30 and len(seen) > 15


@pytest.mark.parametrize(("more", "last_call_before"), [([], 22), (["--share"], 10**6)])
def test_killed_after_it_began_anew_it_does_not_go_on_with_the_run_before(tmp_path: Path, more: list[str], last_call_before: int) -> None:
    """Before it, there was an unfinished run, or a finished share."""
    sources = write_source(tmp_path, documents=30, seed=7)
    preprocess_data.run(arguments(sources, tmp_path / "whole", *more))
    before, changes = tmp_path / "before", [*more, "--resume", "--restart-if-changed"]
    before.mkdir()
    run_until_call(arguments(sources, before / "out", *more), last_call_before)
    for last_call in range(16):
        prefix = Path(shutil.copytree(before, tmp_path / str(last_call))) / "out"
        assert run_until_call(arguments(sources[:1], prefix, *changes), last_call)
        preprocess_data.run(arguments(sources, prefix, *changes))
        assert digests(prefix) == digests(tmp_path / "whole"), last_call


def test_files_are_on_the_disk_before_the_journal_relies_on_them_and_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(write_source(tmp_path, documents=30, seed=7), tmp_path / "out", "--journal-interval", "3600")
    events = disk_events(monkeypatch)
    preprocess_data.run(args)
    partial_files = [f"sync out_{key}_document.{kind}.partial" for key in ("text", "more") for kind in ("bin", "idx", "doc")]
    folder = f"sync {tmp_path.name}"
    journal = ["sync out.unfinished.tmp", "rename out.unfinished", folder]
    named = [[folder, f"rename out_{key}_document.bin", folder, f"rename out_{key}_document.idx", folder] for key in ("text", "more")]
    skipped = "out_skipped_lines.txt"
    progress, whole = [*partial_files, f"sync {skipped}.partial", *journal], [*partial_files, *journal]
    assert events == [*progress, *whole, *named[0], *named[1], f"rename {skipped}", folder, folder]


@pytest.mark.parametrize(("skipped_lines", "left"), [(1, ["out_skipped_lines.txt"]), (0, [])])
def test_an_end_interrupted_behind_its_list_keeps_that_list_alone(tmp_path: Path, skipped_lines: int, left: list[str]) -> None:
    (tmp_path / "out_skipped_lines.txt").write_text("line")
    progress = Progress(skipped_lines=skipped_lines, skipped_list_bytes=4 * skipped_lines, is_complete=True)
    CorpusBuilder(Journal(str(tmp_path / "out"), [], {}), [], np.dtype("uint16"), 0, progress).finish()
    assert [path.name for path in tmp_path.iterdir()] == left
    assert all(path.read_text() == "line" for path in tmp_path.iterdir())


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_key_that_cannot_be_written_leaves_nothing_of_the_others_but_what_is_gone_on_from(tmp_path: Path, goes_on: bool) -> None:
    (tmp_path / "out_more_document.bin.partial").mkdir()
    start = Progress(extents={"text": Extent(), "more": Extent()}) if goes_on else None
    if goes_on:
        IndexedDatasetWriter(str(tmp_path / "out_text_document"), np.dtype("uint16")).close()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(IsADirectoryError):
        CorpusBuilder(Journal(str(tmp_path / "out"), [], {}), ["text", "more"], np.dtype("uint16"), 0, start)
    assert sorted(tmp_path.iterdir()) == before


def unfinished(folder: Path) -> tuple[list[Path], Path]:
    """The sources and prefix of a run that was ended after its first journal entry."""
    sources, prefix = write_source(folder, documents=30, seed=7), folder / "out"
    assert run_until_call(arguments(sources, prefix), 22)
    assert (folder / "out.unfinished").exists()
    return sources, prefix


def test_an_unfinished_run_is_not_thrown_away_by_accident(tmp_path: Path) -> None:
    sources, prefix = unfinished(tmp_path)
    with pytest.raises(UserError, match=r"has an unfinished run; give --resume to continue it, or remove .*out\.unfinished to start anew"):
        preprocess_data.run(arguments(sources, prefix))
    (tmp_path / "out.unfinished").unlink()
    preprocess_data.run(arguments(sources, prefix))
    assert len(digests(prefix)) == 5


@pytest.mark.parametrize("change", ["content", "time", "order", "fewer", "flags", "journal", "partial", "list"])
def test_going_on_with_something_else_is_refused(tmp_path: Path, change: str) -> None:
    sources, prefix = unfinished(tmp_path)
    more: list[str] = []
    if change == "content":
        sources[0].write_bytes(sources[0].read_bytes() + b"\n")
        message = r"--input .*a\.jsonl has changed \(it had \d+ bytes, it has \d+"
    elif change == "time":
        os.utime(sources[0], ns=(0, 0))
        message = r"--input .*a\.jsonl has changed .* or it was written anew\); to start anew, remove .*out\.unfinished"
    elif change == "order":
        sources.reverse()
        message = r"b\.jsonl\.gz is at the place of .*a\.jsonl"
    elif change == "fewer":
        sources.pop()
        message = "names 1 file, before 2"
    elif change == "flags":
        more = ["--vocab-size", "1001"]
        message = "run had --vocab-size 1000, this command has --vocab-size 1001; give --vocab-size 1000, or to start anew, remove"
    elif change == "journal":
        (tmp_path / "out.unfinished").write_text("{")
        message = "unfinished is not JSON: line 1, column 2"
    elif change == "list":
        Path(f"{prefix}_skipped_lines.txt.partial").unlink()
        message = r"out_skipped_lines\.txt\.partial has 0 bytes, \d+ were written"
    else:
        Path(f"{prefix}_text_document.bin.partial").write_bytes(b"")
        message = "bin.partial has 0 bytes"
    with pytest.raises(UserError, match=message):
        preprocess_data.run(arguments(sources, prefix, "--resume", *more))


@pytest.mark.parametrize(("kept", "is_begun"), [(0.5, True), (0.001, False)])
def test_after_damage_the_way_on_that_is_named_is_one_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float, is_begun: bool
) -> None:
    monkeypatch.setattr("megatron_zpp.data.preprocess.json_lines.BATCH_BYTES", 5000)
    sources = write_source(tmp_path, documents=200, seed=3)
    whole = sources[1].read_bytes()
    sources[1].write_bytes(whole[: max(12, int(kept * len(whole)))])
    with pytest.raises(UserError, match=r"b\.jsonl\.gz is damaged or cut off \(.*\); copy it again; ") as error:
        preprocess_data.run(arguments(sources, tmp_path / "out"))
    sources[1].write_bytes(whole)
    if is_begun:
        assert str(error.value).endswith(f"copy it again; to start anew, remove {tmp_path / 'out.unfinished'}.")
        with pytest.raises(UserError, match=r"b\.jsonl\.gz has changed"):
            preprocess_data.run(arguments(sources, tmp_path / "out", "--resume"))
        (tmp_path / "out.unfinished").unlink()
        preprocess_data.run(arguments(sources, tmp_path / "out"))
    else:
        assert str(error.value).endswith("; the same command with --resume continues from there.")
        preprocess_data.run(arguments(sources, tmp_path / "out", "--resume"))
    preprocess_data.run(arguments(sources, tmp_path / "other"))
    assert digests(tmp_path / "out") == digests(tmp_path / "other")


def test_a_bad_line_far_into_the_text_costs_nothing_that_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_zpp.data.preprocess.json_lines.BATCH_BYTES", 100)
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": str(i), "more": ""} for i in range(50)])
    source.write_text(source.read_text() + "{\n" + '{"text": "7", "more": ""}\n')
    args = arguments([source], tmp_path / "out")
    args.skip_invalid = False
    with pytest.raises(
        ValueError, match=r"in.jsonl, line 51: not JSON .*; with --resume and --skip-invalid the same command continues from there\."
    ):
        preprocess_data.run(args)
    args.skip_invalid, args.resume = True, True
    preprocess_data.run(args)
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == [*([i, 999] for i in range(50)), [7, 999]]
    assert (tmp_path / "out_skipped_lines.txt").read_text().startswith(f"{source}, line 51: ")


def test_an_input_that_was_not_begun_may_be_mended(tmp_path: Path) -> None:
    sources = [write_json_lines(tmp_path / f"{name}.jsonl", [{"text": name, "more": ""}]) for name in "123"]
    good = sources[1].read_text()
    sources[1].write_text("{\n")
    args = arguments(sources, tmp_path / "out")
    args.skip_invalid = False
    with pytest.raises(UserError, match=r"2.jsonl, line 1: not JSON"):
        preprocess_data.run(args)
    sources[1].write_text(good)
    args.resume = True
    preprocess_data.run(args)
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == [[1, 999], [2, 999], [3, 999]]
    assert sorted(digests(tmp_path / "out")) == [f"_{key}_document.{ending}" for key in ("more", "text") for ending in ("bin", "idx")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("nothing", "out was done before."),
        ("content", "a.jsonl has changed"),
        ("flags", "this command has --vocab-size 1001"),
        ("file", "out_more_document.bin is missing; to start anew, remove"),
    ],
)
def test_a_finished_share_is_not_repeated_unless_what_it_was_made_from_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    sources = [write_json_lines(tmp_path / f"{name}.jsonl", [{"text": "1", "more": ""}]) for name in "ab"]
    again = ["--share", "--resume", "--restart-if-changed"]
    preprocess_data.run(arguments(sources, tmp_path / "out", *again))
    args = arguments(sources, tmp_path / "out", *again, *(["--vocab-size", "1001"] if change == "flags" else []))
    if change == "content":  # with as many bytes, less than a microsecond later
        changed_ns = sources[0].stat().st_mtime_ns
        sources[0].write_text(sources[0].read_text().replace("1", "2"))
        os.utime(sources[0], ns=(changed_ns + 1, changed_ns + 1))
    elif change == "file":
        (tmp_path / "out_more_document.bin").unlink()
    capsys.readouterr()
    preprocess_data.run(args)
    printed = capsys.readouterr().out
    assert (tmp_path / "out_more_document.bin").exists()
    assert said in printed and ("starting at the beginning" in printed) is (change != "nothing")
    assert IndexedDataset(str(tmp_path / "out_text_document")).read(0).tolist() == [2 if change == "content" else 1, args.vocab_size - 1]


def test_a_finished_share_that_left_lines_out_is_not_taken_by_a_command_that_leaves_none_out(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1", "more": ""}\n{\n')
    args = arguments([source], tmp_path / "out", "--share", "--resume")
    preprocess_data.run(args)
    args.skip_invalid = False
    with pytest.raises(UserError, match=r"had 1 invalid line of .*out left out; give --skip-invalid, or .* remove .*out\.finished\."):
        preprocess_data.run(args)
    args.restart_if_changed = True
    with pytest.raises(UserError, match=r"in\.jsonl, line 2: not JSON"):
        preprocess_data.run(args)


def test_a_run_that_is_no_share_leaves_no_record_of_an_earlier_share(tmp_path: Path) -> None:
    sources = write_source(tmp_path, documents=30, seed=7)
    preprocess_data.run(arguments(sources[:1], tmp_path / "out", "--share"))
    assert (tmp_path / "out.finished").exists()
    preprocess_data.run(arguments(sources, tmp_path / "out", "--resume"))
    preprocess_data.run(arguments(sources, tmp_path / "whole"))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_record_has_flags_that_came_later_only_where_they_change_ids() -> None:
    """So a run that an earlier version began goes on, unless its tokenizer is another today."""
    before = set(tokenizer_identity(DataConfig(tokenizer_type="NullTokenizer", vocab_size=9)))
    assert len(before) == 9
    assert set(tokenizer_identity(DataConfig(tokenizer_type="Llama2Tokenizer", legacy_tokenizer=True))) == before
    assert set(tokenizer_identity(DataConfig(tokenizer_type="Llama2Tokenizer"))) == {*before, "legacy_tokenizer"}
    for eod in (0, 3):
        other = tokenizer_identity(DataConfig(tokenizer_type="NullTokenizer", vocab_size=9, null_tokenizer_eod_id=eod))
        assert set(other) == {*before, "null_tokenizer_eod_id"}
    without = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_hf_no_include_special_tokens=True)
    assert set(tokenizer_identity(without)) == {*before, "tokenizer_hf_no_include_special_tokens"}
