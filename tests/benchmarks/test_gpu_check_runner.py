"""The runner of benchmarks/gpu_check.py with parts that end, fail, die and hang; its clock moves when the test says so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.fake_commands import FakeCommands
from harness.pages import text_of
from harness.places import ROOT

from benchmarks.gpu import part_process
from benchmarks.gpu.commands import run_program
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import read_json, write_json
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.parts import WAVES, Part, Wave, all_parts, chosen
from benchmarks.gpu.runner import FAILED_CODE, KILL_SECONDS, LATE_CODE, PASSED_CODE, USELESS_CODE, Runner, end_session
from benchmarks.gpu.texts import MOST_FAILURES, MOST_PRINTED, printed
from benchmarks.gpu.version import commit, source_digest
from benchmarks.gpu_check import DEFAULT_LIMIT_SECONDS

ABOUT = {"commit": "abc"}


def part(name: str, least_seconds: float = 1.0, limit_seconds: float = 1000.0) -> Part:
    return Part(name, 2.0, least_seconds, limit_seconds, f"what {name} does")


class Clock:
    """Stands still until one of its files is there; then a long time has passed."""

    def __init__(self, marks: list[Path]) -> None:
        self.marks = marks

    def __call__(self) -> float:
        return 1e4 * sum(mark.exists() for mark in self.marks)


class Parts:
    """Parts that are programs of the shell. seconds: what each was given."""

    def __init__(self, folder: Path, programs: dict[str, str]) -> None:
        self.folder = folder
        self.programs = programs
        self.seconds: dict[str, float] = {}
        self.said: list[str] = []

    def command(self, part: Part, seconds: float, result: Path) -> list[str]:
        self.seconds[part.name] = seconds
        return ["sh", "-c", self.programs[part.name].replace("RESULT", str(result)).replace("FOLDER", str(self.folder))]

    def written(self, status: str = "passed", **more: Any) -> str:
        """A program that writes this report at once."""
        content = {**Outcome(["a line"]).as_json(status), **more}
        made = self.folder / f"report-{len(list(self.folder.iterdir()))}.json"
        write_json(made, content)
        return f"cp {made} RESULT.made && mv RESULT.made RESULT"

    def run(self, *names: str, limit: float = 1e5, clock: Callable[[], float] = lambda: 0.0, **limits: float) -> tuple[int, dict[str, Any]]:
        runner = Runner(self.folder / "out", limit, self.command, ABOUT, self.said.append, clock)
        code = runner.run([(part(name, **limits),) for name in names])
        return code, read_json(self.folder / "out" / "gpu_check.json")


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path, {})


def test_the_summary_has_the_reports_of_all_parts_and_no_other_file_stays(parts: Parts) -> None:
    parts.programs = {"one": parts.written(measured={"speed": 3}), "two": parts.written("not done", omissions=["no such device"])}
    code, summary = parts.run("one", "two")
    assert code == summary["exit_code"] == PASSED_CODE
    assert list(summary["parts"]) == ["one", "two"] and summary["commit"] == "abc"
    assert summary["parts"]["one"]["measured"] == {"speed": 3} and summary["unfinished"] == []
    assert sorted(path.name for path in (parts.folder / "out").iterdir()) == ["gpu_check.json", "gpu_check.txt"]
    assert summary["could_not_do"] == ["could not do, two: no such device"]
    text = (parts.folder / "out" / "gpu_check.txt").read_text()
    assert "one: passed" in text and "could not do, two: no such device" in text


def test_the_table_of_the_page_has_all_parts_in_their_order() -> None:
    table = text_of("benchmarks/README.md").split("| part | what it finds out |")[1].split("\n\n")[0]
    firsts = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    assert [name for cell in firsts for name in re.findall(r"\w+", cell)] == list(all_parts())


def test_a_failed_part_is_told_and_the_next_one_still_runs(parts: Parts) -> None:
    parts.programs = {"one": parts.written("failed", failures=["bits differ"]), "two": parts.written()}
    code, summary = parts.run("one", "two")
    assert code == FAILED_CODE and summary["parts"]["two"]["status"] == "passed"
    assert "FAILED, one: bits differ" in (parts.folder / "out" / "gpu_check.txt").read_text()


def test_a_part_that_dies_keeps_what_it_has_found_and_what_it_has_printed(parts: Parts) -> None:
    parts.programs = {"one": f"{parts.written('unfinished')}; echo last words; kill -SEGV $$", "two": "exit 3"}
    code, summary = parts.run("one", "two")
    one, two = summary["parts"]["one"], summary["parts"]["two"]
    assert code == FAILED_CODE and one["status"] == two["status"] == "failed"
    assert one["lines"][0] == "a line" and "    last words" in one["lines"] and one["failures"] == ["the part died with exit code -11"]
    assert two["failures"] == ["the part died with exit code 3"]


def test_a_part_that_hangs_or_is_slow_is_killed_with_its_children_and_is_cut_short_with_all_that_it_has_found(parts: Parts) -> None:
    mark = parts.folder / "child"
    hangs = f"{parts.written('unfinished')}; sleep 1000 & echo $! > FOLDER/made; mv FOLDER/made {mark}; wait"
    parts.programs = {"one": hangs, "two": parts.written()}
    code, summary = parts.run("one", "two", clock=Clock([mark]), limit_seconds=1000.0)
    one = summary["parts"]["one"]
    assert code == LATE_CODE and one["status"] == "cut short" and one["failures"] == [] and one["lines"][0] == "a line"
    assert summary["could_not_do"] == ["no time for, one: no end within 1000 s: it hangs, or needs longer here"]
    assert summary["parts"]["two"]["status"] == "passed"
    assert is_gone(int(mark.read_text()))
    assert not (parts.folder / "out" / "parts").exists()


def test_a_process_with_a_group_of_its_own_that_a_part_leaves_behind_is_killed_too(parts: Parts) -> None:
    parts.programs = {"one": f"bash -c 'set -m; sleep 1000 & echo $! > FOLDER/child'; {parts.written()}"}
    code, _ = parts.run("one")
    assert code == PASSED_CODE and is_gone(int((parts.folder / "child").read_text()))


def test_a_part_that_gets_less_time_than_its_limit_is_cut_short_and_has_not_failed(parts: Parts) -> None:
    mark = parts.folder / "mark"
    parts.programs = {"one": f"{parts.written('unfinished')}; touch {mark}; sleep 1000", "two": parts.written()}
    code, summary = parts.run("one", "two", limit=500.0, clock=Clock([mark]))
    assert code == LATE_CODE
    assert [summary["parts"][name]["status"] for name in ("one", "two")] == ["cut short", "cut short"]
    assert "no end within 495 s" in summary["could_not_do"][0] and "nearly over: what two does" in summary["could_not_do"][1]


def test_a_part_that_hangs_after_a_check_has_failed_has_failed(parts: Parts) -> None:
    mark = parts.folder / "mark"
    parts.programs = {"one": f"{parts.written('unfinished', failures=['bits differ'])}; touch {mark}; sleep 1000"}
    code, summary = parts.run("one", clock=Clock([mark]))
    assert code == FAILED_CODE and summary["parts"]["one"]["status"] == "failed" and summary["parts"]["one"]["failures"] == ["bits differ"]


def test_seconds_that_a_part_did_not_need_are_passed_on(parts: Parts) -> None:
    parts.programs = dict.fromkeys(("one", "two"), parts.written())
    parts.run("one", "two", limit=300.0)
    assert parts.seconds == {"one": 290.0, "two": 290.0}


def test_parts_of_one_wave_run_at_the_same_time(parts: Parts) -> None:
    meets = "until [ -e FOLDER/{theirs} ]; do touch FOLDER/{own}; sleep 0.01; done; touch FOLDER/{own}; "
    parts.programs = {
        "one": meets.format(own="a", theirs="b") + parts.written(),
        "two": meets.format(own="b", theirs="a") + parts.written(),
    }
    runner = Runner(parts.folder / "out", 1e5, parts.command, ABOUT, parts.said.append)
    assert runner.run([(part("one"), part("two"))]) == PASSED_CODE


def test_the_next_wave_does_not_wait_for_a_part_in_the_background(parts: Parts) -> None:
    parts.programs = {
        "one": f"until [ -e FOLDER/a ]; do sleep 0.01; done; {parts.written()}",
        "two": f"{parts.written()}; touch FOLDER/a",
    }
    runner = Runner(parts.folder / "out", 1e5, parts.command, ABOUT, parts.said.append)
    assert runner.run([(replace(part("one"), is_in_background=True),), (part("two"),)]) == PASSED_CODE


def test_a_run_that_is_interrupted_ends_its_part_and_writes_what_it_has(parts: Parts) -> None:
    parts.programs = {"one": parts.written(), "two": f"{parts.written('unfinished')}; sleep 1000", "three": parts.written()}
    runner = Runner(parts.folder / "out", 1e5, parts.command, ABOUT, lambda text: "== two" in text and runner.interrupt("ended by SIGTERM"))
    assert runner.run([(part(name),) for name in ("one", "two", "three")]) == LATE_CODE
    found = read_json(parts.folder / "out" / "gpu_check.json")["parts"]
    assert [found[name]["status"] for name in ("one", "two", "three")] == ["passed", "cut short", "cut short"]


def test_a_summary_of_a_run_under_way_names_the_parts_that_have_not_ended_and_is_no_success(parts: Parts) -> None:
    """A run may be killed without a chance to write."""
    out, summaries, texts = parts.folder / "out", list[dict[str, Any]](), list[str]()

    def look(said: str) -> None:
        summaries.append(read_json(out / "gpu_check.json"))
        texts.append((out / "gpu_check.txt").read_text())

    parts.programs = dict.fromkeys(("one", "two"), parts.written())
    Runner(out, 1e5, parts.command, ABOUT, look).run([(part("one"),), (part("two"),)])
    assert [summary["unfinished"] for summary in summaries] == [["one", "two"], ["one", "two"], ["two"], ["two"]]
    assert {summary["exit_code"] for summary in summaries} == {LATE_CODE}
    assert "unfinished: one, two\n" in texts[0]


def test_the_end_of_a_killed_part_is_awaited_no_longer_than_the_check_may_take(monkeypatch: pytest.MonkeyPatch, parts: Parts) -> None:
    mark = parts.folder / "mark"
    parts.programs = {"one": f"{parts.written('unfinished')}; touch {mark}; sleep 1000"}
    waits: list[float] = []

    def end(process: subprocess.Popen[bytes], seconds: float) -> None:
        waits.append(seconds)
        end_session(process, KILL_SECONDS)

    monkeypatch.setattr("benchmarks.gpu.runner.end_session", end)
    parts.run("one", limit=500.0, clock=Clock([mark]))
    assert waits == [0.0]


def names_of(waves: Sequence[Wave]) -> list[list[str]]:
    return [[part.name for part in wave] for wave in waves]


def test_what_measures_times_or_rates_is_alone_in_its_wave() -> None:
    alone = [wave[0].name for wave in WAVES if len(wave) == 1]
    measures = ["training", "speed", "several_gpus", "tensor", "offload", "sanitizer", "script", "counters"]
    assert alone == ["machine", "library", *measures]


def test_the_machine_is_always_first_and_builds_apex_compile_and_what_needs_minutes_run_only_when_asked_for() -> None:
    by_default = [name for wave in chosen() for name in (part.name for part in wave)]
    assert by_default[:2] == ["machine", "library"]
    assert set(all_parts()) - set(by_default) == {"builds", "apex", "compile", "sanitizer", "script", "counters"}
    assert names_of(chosen(["compile", "threads"])) == [["machine"], ["threads"], ["compile"]]


def expected_seconds(waves: Sequence[Wave]) -> float:
    """On a machine with one GPU, where several_gpus has nothing to do."""
    times = ([part.estimate_seconds for part in wave if not part.is_in_background] for wave in waves if wave[0].name != "several_gpus")
    return sum(map(max, times))


def test_on_one_gpu_the_parts_that_run_by_default_leave_a_fifth_of_the_default_limit() -> None:
    assert expected_seconds(chosen()) <= 0.8 * DEFAULT_LIMIT_SECONDS


HALF_HOUR = (ROOT / "benchmarks" / "gpu_half_hour.sh").read_text()
COMMANDS = re.findall(r"^ +(\d)\) seconds=(\d+) parts=\(([a-z_ ]+)\) ;;$", HALF_HOUR, re.MULTILINE)


def test_the_four_commands_of_the_half_hour_take_the_parts_in_their_order_and_leave_a_fifth_of_their_limit() -> None:
    assert [number for number, _, _ in COMMANDS] == ["1", "2", "3", "4"]
    for _, seconds, words in COMMANDS:
        waves = chosen(words.split())
        assert words.split() == [name for wave in names_of(waves[1:]) for name in wave]
        assert expected_seconds(waves) <= 0.8 * float(seconds) and float(seconds) <= 570  # of 600 s that a command may take
    in_commands = {name for _, _, words in COMMANDS for name in words.split()}
    assert set(all_parts()) - in_commands == {"machine", "several_gpus", "builds", "apex", "compile"}


def test_every_part_is_a_module_with_a_run() -> None:
    for name in all_parts():
        assert "\ndef run(time: Deadline, outcome: Outcome" in (ROOT / "benchmarks" / "gpu" / f"{name}.py").read_text()


class FakePart:
    """Stands in for the module of a part."""

    def __init__(self, run: Callable[[Deadline, Outcome], None]) -> None:
        self.run = run


def run_in_process(run: Callable[[Deadline, Outcome], None], file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(part_process.importlib, "import_module", lambda name: FakePart(run))
    part_process.run_part("threads", 10.0, file)
    return read_json(file)


def test_a_part_writes_every_finding_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, seen = tmp_path / "part.json", []

    def run(time: Deadline, outcome: Outcome) -> None:
        assert time.has(1.0) and not time.has(11.0)
        outcome.check("one", holds=True)
        seen.append(read_json(file))
        outcome.measure(speed=2)
        seen.append(read_json(file))

    found = run_in_process(run, file, monkeypatch)
    assert [(one["status"], one["lines"], one["measured"]) for one in (*seen, found)] == [
        ("unfinished", ["holds: one"], {}),
        ("unfinished", ["holds: one"], {"speed": 2}),
        ("passed", ["holds: one"], {"speed": 2}),
    ]


def test_the_time_of_a_part_begins_before_its_module_is_imported_which_imports_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    left: list[float] = []

    def import_module(name: str) -> Any:
        now[0] += 7.0
        return FakePart(lambda time, outcome: left.append(time.remaining_seconds()))

    monkeypatch.setattr(part_process, "Deadline", lambda seconds: Deadline(seconds, lambda: now[0]))
    monkeypatch.setattr(part_process.importlib, "import_module", import_module)
    part_process.run_part("threads", 10.0, tmp_path / "threads.json")
    assert left == [3.0]


def raising(error: BaseException) -> Callable[[Deadline, Outcome], None]:
    def run(time: Deadline, outcome: Outcome) -> None:
        raise error

    return run


def unchecked(statement: str) -> Callable[[Deadline, Outcome], None]:
    return lambda time, outcome: outcome.ran_late(statement)


@pytest.mark.parametrize(
    "run, status, where",
    [
        (raising(NotDone("no GPU")), "not done", "omissions"),
        (raising(ValueError("no GPU")), "failed", "failures"),
        (raising(KeyboardInterrupt("no GPU")), "failed", "failures"),
        (unchecked("no GPU"), "cut short", "late"),
    ],
)
def test_the_status_of_a_part_says_how_it_ended(
    run: Callable[[Deadline, Outcome], None], status: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_in_process(run, tmp_path / "part.json", monkeypatch)
    assert found["status"] == status and "no GPU" in found[where][0]


def test_a_check_that_fails_makes_its_part_fail_even_if_the_rest_was_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(time: Deadline, outcome: Outcome) -> None:
        outcome.check("bits are equal", holds=False)
        raise NotDone("the rest")

    assert run_in_process(run, tmp_path / "part.json", monkeypatch)["status"] == "failed"


def ended(*words: str) -> subprocess.CompletedProcess[str]:
    """A script of benchmarks/, where torch finds no GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    command = ["bash", f"benchmarks/{words[0]}", *words[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def test_a_command_of_the_half_hour_ends_without_a_gpu_after_the_machine_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    done = ended("gpu_half_hour.sh", "4", "--limit-seconds", "940")
    summary = read_json(tmp_path / "4" / "gpu_check.json")
    assert done.returncode == summary["exit_code"] == USELESS_CODE, done.stdout
    assert list(summary["parts"]) == ["machine"] and summary["unfinished"] == ["library", "counters"]
    assert "at most 300)" in done.stdout  # twice its own limit, because the check may take twice as long as by default
    assert "everything on a GPU: torch finds none here" in done.stdout and "== machine: not done" in done.stdout
    assert f"command 4: exit code {USELESS_CODE} after" in done.stdout
    assert summary["machine"]["torch"] and summary["sources"] == source_digest() and summary["limit_seconds"] == 940


def test_the_half_hour_has_no_other_commands_than_four() -> None:
    done = ended("gpu_half_hour.sh", "5")
    assert done.returncode == 2 and "error: 5 is not the number of a command; give 1, 2, 3 or 4." in done.stdout
    assert ended("gpu_half_hour.sh").returncode == 2 and ended("gpu_half_hour.sh", "--help").returncode == 0


@pytest.mark.parametrize("number, mounts", [("1", 0), ("2", 1), ("3", 1), ("4", 0)])
def test_a_command_of_the_half_hour_mounts_space_for_ranks_alone_owns_its_build_and_ends_with_the_code_of_the_check(
    number: str, mounts: int, tmp_path: Path
) -> None:
    folder, fakes = tmp_path / "copy" / "benchmarks", FakeCommands(tmp_path)
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "gpu_half_hour.sh", folder)
    (folder / "gpu_check.sh").write_text('echo "checked $*"; exit 3')
    fakes.add("df", "print('Avail\\n   64')")
    for name in ("mount", "chown"):
        fakes.add(name)
    fakes.add("tar", "sys.exit(1)")
    done = fakes.run("bash", "benchmarks/gpu_half_hour.sh", number, folder=folder.parent, OUT=str(tmp_path / "out"))
    assert done.returncode == 3 and f"--output {tmp_path}/out/{number} --parts library" in done.stdout, done.stderr
    assert len(fakes.calls("mount")) == mounts and [call.words[-1] for call in fakes.calls("chown")] == [".build"]
    assert ("build.tgz is not whole" in done.stdout) == (number == "1")
    assert done.stdout.splitlines()[-1].startswith(f"command {number}: exit code 3 after")


def checked(folder: Path, *flags: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and summary of the command."""
    done = ended("gpu_check.sh", "--output", str(folder), *flags)
    return done.returncode, done.stdout, read_json(folder / "gpu_check.json")


def test_on_a_cpu_the_command_runs_parts_without_a_gpu_if_asked(tmp_path: Path) -> None:
    code, said, summary = checked(tmp_path, "--on-cpu", "--parts", "several_gpus")
    assert code == summary["exit_code"] == PASSED_CODE, said
    assert [found["status"] for found in summary["parts"].values()] == ["not done", "not done"]


def test_an_error_of_the_build_is_kept_whole_and_the_other_parts_still_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -c "*) seq 999; echo "kernel.cpp:7: error: one of many"; seq 999; exit 1;; *) exec c++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    code, said, summary = checked(tmp_path, "--on-cpu", "--parts", "library", "bits")
    statuses = {name: found["status"] for name, found in summary["parts"].items()}
    assert code == FAILED_CODE
    assert statuses == {"machine": "not done", "library": "failed", "bits": "not done"}
    assert len(summary["parts"]["library"]["lines"]) > 2 * 999
    assert "library: kernel.cpp:7: error: one of many" in said and "FAILED, library: the library of kernels builds" in said
    assert len(said) < 12_000


def test_if_a_part_that_is_needed_does_not_pass_it_is_the_last(parts: Parts) -> None:
    for status, more, code in (("not done", {"omissions": ["no GPU"]}, USELESS_CODE), ("failed", {"failures": ["broken"]}, FAILED_CODE)):
        parts.programs = {"one": parts.written(status, **more), "two": parts.written()}
        runner = Runner(parts.folder / "out", 1e5, parts.command, ABOUT, parts.said.append)
        assert runner.run([(replace(part("one"), is_needed=True),), (part("two"),)]) == code
        summary = read_json(parts.folder / "out" / "gpu_check.json")
        assert list(summary["parts"]) == ["one"] and summary["unfinished"] == ["two"] and summary["exit_code"] == code


def report_of(status: str, **found: Any) -> dict[str, Any]:
    return {**Outcome().as_json(status), **found, "seconds": 1.0}


def test_what_is_printed_stays_below_its_limit_however_much_was_found_and_the_statuses_are_last() -> None:
    long = [f"{number} {'x' * 5000}" for number in range(300)]
    everything = {"lines": long, "failures": long, "omissions": long, "late": long}
    reports = {name: report_of("failed", **everything) for name in all_parts()}
    text = printed(reports, "gpu_check.txt")
    lines = text.splitlines()
    assert len(text) <= MOST_PRINTED
    assert lines[-len(reports) - 1 : -1] == [f"== {name}: failed (1.0 s)" for name in reports]
    progress = 2 * sum(len(f"== {name} starts (about 200 s, at most 1234)") + 1 for name in reports)
    assert len(text) + progress < 12_000


def test_ten_failures_of_a_part_are_printed_and_how_many_more_there_are() -> None:
    failures = [f"kernel {number} differs" for number in range(MOST_FAILURES + 3)]
    lines = ["holds: one", *(f"FAILS: {failure}" for failure in failures), "a figure"]
    text = printed({"bits": report_of("failed", failures=failures, lines=lines), "speed": report_of("passed")}, "gpu_check.txt")
    told = [f"FAILED, bits: {failure}" for failure in failures[:MOST_FAILURES]]
    assert text.splitlines() == [
        "bits: a figure", *told, "3 more of bits", "== bits: failed (1.0 s)", "== speed: passed (1.0 s)", "everything is in gpu_check.txt"
    ]  # fmt: skip


def test_of_a_part_one_failure_of_every_kernel_is_printed_before_the_second_of_any() -> None:
    failures = [f"{op}, case {case}" for op in ("encode", "decode", "mean") for case in range(8)]
    text = printed({"bits": report_of("failed", failures=failures)}, "gpu_check.txt")
    told = [line.removeprefix("FAILED, bits: ") for line in text.splitlines() if line.startswith("FAILED")]
    assert told == [f"{op}, case {case}" for case in range(3) for op in ("encode", "decode", "mean")] + ["encode, case 3"]


def test_a_program_that_takes_too_long_is_killed_with_those_that_it_has_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    started = f"sleep 1000 & echo $! > {child}.made; mv {child}.made {child}; wait"
    done = run_program(["sh", "-c", started], OnceThere(child))
    assert done.code is None and is_gone(int(child.read_text()))


class OnceThere(Deadline):
    """Is over once a file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__(0.0)
        self._file = file

    def remaining_seconds(self) -> float:
        while not self._file.exists():
            os.sched_yield()
        return 0.0


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--parts", "lader"], "lader"),
        (["--limit-seconds", "0"], "--limit-seconds 0.0"),
        (["--apex-sources", "."], "which is not among --parts"),
    ],
)
def test_a_mistake_in_a_flag_is_named(flags: list[str], word: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and word in done.stderr


def test_a_copy_without_git_is_known_by_its_sources(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number) / "csrc"
        folder.mkdir(parents=True)
        (folder / "a.cu").write_text(f"kernel {number}")
    assert source_digest(tmp_path / "1") != source_digest(tmp_path / "2")
    assert commit(tmp_path) == "unknown"


def is_gone(process_id: int) -> bool:
    for _ in process_states(process_id):
        pass
    return True


def process_states(process_id: int) -> Iterator[str]:
    """The states of a process until it has ended; a killed one may need its turn."""
    while True:
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        yield state
        os.sched_yield()
