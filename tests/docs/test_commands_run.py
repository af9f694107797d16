"""Commands of the pages do what the pages say, as printed and in the order of a reader; only sizes are small (harness/reader.py)."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import plan_run
import pytest
from harness.megatron_files import random_model, write_legacy
from harness.pages import FENCED, Command, command_of, commands, text_of
from harness.parts import all_in
from harness.places import ROOT
from harness.rank_pool import RankPool
from harness.reader import ENTRY, SIZES, Reader
from harness.small_gpt import LLAMA
from planning.estimates import Sizes, sizes_of

pytestmark = pytest.mark.gloo  # all of them: with one folder for the file, nothing is made twice
README, CHECKPOINTS, DATA = "README.md", "docs/checkpoints.md", "docs/data.md"
LONG_SEQUENCES, SLOW_LINKS, IMPORTING = "docs/long_sequences.md", "docs/slow_links.md", "docs/importing.md"
LAUNCHING, LOGS = "docs/launching.md", "docs/logs.md"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A reader who has a tokenizer and a corpus, from the first commands of README."""
    reader = Reader(tmp_path_factory.mktemp("reader"))
    for program in ("train_tokenizer", "preprocess_data"):
        reader.run(command_of(README, f"python tools/{program}.py"))
    return reader


@pytest.fixture(scope="module")
def trained(reader: Reader, ranks: RankPool) -> Reader:
    """The same reader after README's training, interrupted on two ranks of one node and resumed with ZeRO++ on two nodes of two.

    The parts of the nodes are then copied into one folder.
    """
    reader.train(command_of(README, "torchrun --nproc_per_node 4"), ranks, 1, 2, "--exit-interval 2")
    reader.train(command_of(README, "MASTER_ADDR=node0 NODES=2 NODE_RANK=0 bash scripts/torchrun_nodes.sh"), ranks, 2, 2)
    all_in([reader.folder / "my_checkpoints_of_node_1"], reader.folder / "my_checkpoints")
    return reader


def test_readmes_first_commands_make_a_tokenizer_and_a_corpus(reader: Reader) -> None:
    for name in ("my_tokenizer.model", "my_text_text_document.bin", "my_text_text_document.idx"):
        assert (reader.folder / name).stat().st_size > 0


def test_readmes_plan_is_made_where_no_data_are(tmp_path: Path) -> None:
    printed = Reader(tmp_path).run(command_of(README, f"python {ENTRY} --dry-run"), more="")
    assert "GiB" in printed and "s per iteration" in printed


def test_readmes_training_saves_and_goes_on_with_more_ranks_and_zeropp(trained: Reader) -> None:
    assert (trained.folder / "my_checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    records = [json.loads(line) for line in (trained.folder / "my_run.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records if "lm_loss" in record] == [1, 2, 3, 4]


def test_readmes_two_nodes_run_with_the_copies_that_it_names(reader: Reader, ranks: RankPool) -> None:
    assert "`--save-copies 2`" in (ROOT / README).read_text(encoding="utf-8")
    more = "--save copied --load copied --save-copies 2"
    printed = reader.train(command_of(README, "MASTER_ADDR=node0 NODES=2 NODE_RANK=0 bash scripts/torchrun_nodes.sh"), ranks, 2, 2, more)
    assert "copies on the disks of other nodes" in printed
    files = [{path.name for path in (reader.folder / name).glob("iter_0000004/*")} for name in ("copied", "copied_of_node_1")]
    assert files[0] == files[1] and len(files[0]) == 6  # of four ranks, and the manifest with its marker


def test_the_tools_of_the_checkpoints_page_read_what_readmes_training_has_saved(trained: Reader) -> None:
    assert "damaged" not in trained.run(command_of(CHECKPOINTS, "python tools/inspect_checkpoint.py"))
    for program, made in [
        ("consolidate_checkpoint", "my_weights/model.safetensors"),
        ("convert_to_hf", "my_model/config.json"),
        ("convert_from_hf", "my_pretrained/release/complete.json"),
    ]:
        trained.run(command_of(CHECKPOINTS, f"python tools/{program}.py"))
        assert (trained.folder / made).is_file()
    for page in (README, CHECKPOINTS):
        assert trained.run(command_of(page, "python tools/generate_text.py"), more="--max-new-tokens 1").startswith("Once upon a time")


def test_the_files_of_a_checkpoint_are_those_of_the_page(trained: Reader) -> None:
    listed = re.search(r"^```text\n(DIR/latest.*?)^```", text_of(CHECKPOINTS), re.MULTILINE | re.DOTALL)
    assert listed is not None
    saved = {path.name for path in (trained.folder / "my_checkpoints" / "iter_0000002").iterdir()}
    assert set(re.findall(r"^    (\S+)", listed[1], re.MULTILINE)) == saved
    assert (trained.folder / "my_checkpoints" / "latest_checkpointed_iteration.txt").is_file()


def test_a_checkpoint_of_megatron_is_imported_as_the_page_says(reader: Reader) -> None:
    write_legacy(reader.folder / "megatron_checkpoints", random_model(**LLAMA), 2)
    release = reader.folder / "my_pretrained"
    shutil.rmtree(release, ignore_errors=True)  # of another page, whose commands are no continuation
    dry, real = (command for command in commands() if command.page == IMPORTING and "tools/convert_from_megatron.py" in command.words)
    printed = reader.run(dry)
    (line,) = (block for language, block in FENCED.findall(text_of(IMPORTING)) if language == "text")
    assert re.search(re.escape(line.strip()).replace(re.escape("..."), r"\S+"), printed), printed
    assert not release.exists()
    reader.run(real)
    assert (release / "release" / "complete.json").is_file()


def test_the_commands_of_the_data_page_tokenise_show_and_merge(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for program in ("train_tokenizer", "preprocess_data", "inspect_dataset.py --data-path my_text"):
        printed = reader.run(command_of(DATA, f"python tools/{program}"))
    assert "documents" in printed
    (tmp_path / "folder_of_corpora").mkdir()
    for ending in ("bin", "idx"):
        for name in ("a", "b"):
            shutil.copy(tmp_path / f"my_text_text_document.{ending}", tmp_path / "folder_of_corpora" / f"{name}.{ending}")
    reader.run(command_of(DATA, "python tools/merge_datasets.py"))
    reader.run(command_of(DATA, "python tools/inspect_dataset.py --data-path merged"))
    assert (tmp_path / "merged.idx").is_file() and (tmp_path / "lengths.png").is_file()


def test_the_cache_of_a_run_is_built_in_advance(reader: Reader) -> None:
    whole = command_of(README, "torchrun --nproc_per_node 4")
    flags = " ".join(whole.words[whole.words.index(ENTRY) + 1 :])
    begun = command_of("docs/datasets.md", "python tools/build_data_cache.py --ranks 64")
    reader.run(Command(begun.page, begun.words[:-1], ()), more=f"{flags} {SIZES[ENTRY]} --ranks 2")


def test_the_plan_of_the_launching_page_has_its_parts(reader: Reader) -> None:
    printed = reader.run(command_of(LAUNCHING, f"python {ENTRY} --dry-run"), more="")
    assert "GiB" in printed and "s per iteration" in printed


def test_the_launcher_prints_the_commands_of_the_hosts_that_are_left(reader: Reader) -> None:
    (reader.folder / "hosts").write_text("node1 slots=8\nnode2 slots=8\nnode3 slots=8\n")
    for page, hosts in [(LAUNCHING, ["node1", "node2"]), (README, ["node1", "node2", "node3"])]:
        python, program, *words = command_of(page, "python tools/launch.py").words
        printed = reader.run(Command(page, (python, program, "--dry-run", *words), ()))
        assert re.findall(r"\bssh .*?(node\d)", printed) == hosts


def printed_plan(page: str, beginning: str, sizes: Sequence[Sizes], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command of the page prints if groups of ranks could have these sizes alone."""
    monkeypatch.setattr(plan_run, "_other_sizes", lambda config, padded: [some for some in sizes if some != sizes_of(config)])
    with redirect_stdout(io.StringIO()) as printed:
        plan_run.run(*plan_run._split(plan_run._parser(), command_of(page, beginning).words[2:]))
    return printed.getvalue()


def test_the_rows_that_the_long_sequences_page_shows_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = text_of(LONG_SEQUENCES).split("## An 8B model")[1]
    shown = [re.split(r" *\| *", row.strip("| ")) for row in re.findall(r"^\| (?:ZeRO|lean|\d ).*\|$", page, re.MULTILINE)]
    assert len(shown) == 13
    sizes = [Sizes(int(row[0]), int(row[1])) for row in shown if row[0].isdigit()]
    printed = printed_plan(LONG_SEQUENCES, "python tools/plan_run.py --nodes", sizes, monkeypatch)
    rows = [re.split(r" *\| *", row.strip("| ")) for row in printed.splitlines()]
    for row in shown:
        assert any(
            cells[: 2 if row[0].isdigit() else 1] == row[: 2 if row[0].isdigit() else 1] and set(row) <= set(cells) for cells in rows
        ), row


def test_the_plan_of_the_slow_links_page_compares_the_members_and_recommends_one(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = printed_plan(SLOW_LINKS, "python tools/plan_run.py --nodes 24", [], monkeypatch)
    for name in ("ZeRO-0", "ZeRO-3", "+qwZ", "+hpZ", "+qgZ", "ZeRO++", "lean-1", "lean-2", "lean"):
        assert f"| {name:<6} |" in printed
    assert "Recommended: " in printed


def test_the_help_of_a_run_is_printed(reader: Reader) -> None:
    assert "--zero-stage" in reader.run(command_of("docs/flags_that_matter.md", f"python {ENTRY}"), more="")


def test_the_profiled_iterations_are_written_where_the_page_says(reader: Reader) -> None:
    command = command_of(LOGS, f"python {ENTRY}")
    reader.run(command, more="--train-iters 12 --num-workers 0 --vocab-size 100")
    (file,) = re.findall(r"writes `(my_profile/[^`]+)`", text_of(LOGS))
    assert (reader.folder / file).is_file()


@pytest.mark.parametrize("page", [LONG_SEQUENCES, "docs/tensor_parallel.md", "docs/islands.md"])
def test_ranks_that_share_samples_or_layers_or_train_apart_do_as_the_page_says(reader: Reader, ranks: RankPool, page: str) -> None:
    start = "torchrun --nproc-per-node 4 pretrain" if "islands" in page else "torchrun --nproc_per_node 4"
    printed = reader.train(command_of(page, start), ranks, 1, 4)
    assert re.search(r"iteration +4/ +4 ", printed)
    assert ("islands: 2, joined every 8 iterations" in printed) == ("islands" in page)


QUICK = ("checkpoint", "code_errors", "head_loss", "host_adam", "quantization")


def _benchmarks() -> list[object]:
    """The commands of benchmarks that have small sizes; the first one of each quick program runs always, the others only with --long."""
    found = {command.text: command for command in commands() if command.words_with_files[1:2] and command.words_with_files[1] in SIZES}
    chosen, seen = [], set()
    for text, command in found.items():
        folder, _, program = command.words_with_files[1].removesuffix(".py").partition("/")
        if folder == "benchmarks":
            is_long = program not in QUICK or program in seen
            chosen.append(pytest.param(command, id=text, marks=[pytest.mark.long] if is_long else []))
            seen.add(program)
    return chosen


@pytest.mark.parametrize("command", _benchmarks())
def test_a_benchmark_runs_with_small_sizes_and_writes_its_file(tmp_path: Path, command: Command) -> None:
    Reader(tmp_path).run(command)
    (made,) = tmp_path.glob("made.*")
    assert made.stat().st_size > 0
