import json
from pathlib import Path

import pytest
from collect_corpus import write_corpus
from harness.tool import run_tool

from megatron_zpp.system.user_error import UserError


def make_library(root: Path) -> Path:
    files = {
        "a.py": b"A = 1\n",
        "package/b.py": "B = 'é'\n".encode(),
        "package/test/c.py": b"C = 3\r\n",
        "package/empty.py": b"",
        "package/blank.py": b"\n",
        "broken.py": b"# coding: latin-1\n'\xe9'\n",
        "notes.txt": b"no source\n",
        "site-packages/foreign.py": b"F = 1\n",
        "package/__pycache__/b.py": b"P = 1\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_corpus_holds_the_readable_sources_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "out" / "corpus.jsonl"
    assert write_corpus(make_library(tmp_path / "lib"), output, max_bytes=1000) == (3, 6 + 9 + 7)
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    texts = {record["source"]: record["text"] for record in records}
    assert texts == {"a.py": "A = 1\n", "package/b.py": "B = 'é'\n", "package/test/c.py": "C = 3\r\n"}


def test_a_smaller_limit_cuts_the_same_order_short(tmp_path: Path) -> None:
    root = make_library(tmp_path / "lib")
    write_corpus(root, tmp_path / "all", max_bytes=1000)
    write_corpus(root, tmp_path / "some", max_bytes=17)
    some, everything = (tmp_path / "some").read_text(), (tmp_path / "all").read_text()
    assert 0 < len(some) < len(everything)
    assert everything.startswith(some)


def test_nothing_to_collect_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    assert write_corpus(tmp_path / "lib", tmp_path / "out.jsonl", max_bytes=1000) == (0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["lib"]


def test_the_tool_writes_the_same_bytes_twice_and_says_when_they_are_few(tmp_path: Path) -> None:
    outputs = []
    for name in ("one", "two"):
        done = run_tool("collect_corpus", "--output", tmp_path / name, "--max-megabytes", 0.5)
        assert done.returncode == 0
        assert "This is less than 5 MB" in done.stdout
        outputs.append((tmp_path / name).read_bytes())
    assert outputs[0] == outputs[1]
    assert 100_000 < sum(len(json.loads(line)["text"].encode()) for line in outputs[0].splitlines()) <= 500_000


@pytest.mark.parametrize("limit", ["0", "nan", "inf", "1e300", "x"])
def test_a_limit_that_is_no_size_is_refused(tmp_path: Path, limit: str) -> None:
    done = run_tool("collect_corpus", "--output", tmp_path / "out", "--max-megabytes", limit)
    assert done.returncode == 2
    assert f"error: argument --max-megabytes: {limit} is not a number of megabytes above 0" in done.stderr


def test_an_output_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--output \. names no file"):
        write_corpus(make_library(tmp_path / "lib"), Path(""), max_bytes=1000)
