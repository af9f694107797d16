import json
from pathlib import Path

import pytest
from harness.tool import write_json_lines

from benchmarks.quickstart import COMPARED, figures_of, main

pytestmark = pytest.mark.pure


def steps(nbytes: int) -> list[dict[str, float]]:
    traffic = {"inter_node_bytes": nbytes, "intra_node_bytes": 5, "model_state_bytes": 3}
    return [{"iteration": n, "lm_loss": 8.0 - n, "elapsed_ms_per_iteration": 100 * n, **traffic} for n in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json_lines(tmp_path / "log.jsonl", [*steps(7), {"iteration": 3, "validation_loss": 4.5}])
    for index, name in enumerate(COMPARED.values()):
        write_json_lines(tmp_path / name, steps(index))
    (tmp_path / "statistics.json").write_text('Unigram cross-entropy: 6\n{"unigram_cross_entropy_nats": 6.0}\n')
    write_json_lines(tmp_path / "seconds.json", [{"seconds": 147}])
    (tmp_path / "sample.txt").write_text("    def __init__(self):\n")
    return tmp_path


def test_the_figures_are_those_of_the_logs(folder: Path) -> None:
    figures = figures_of(folder)
    assert (figures["seconds"], figures["token_frequencies_loss"], figures["gain_nats"]) == (147, 6.0, 1.5)
    assert figures["run"]["losses"] == {1: 7.0, 2: 6.0, 3: 5.0} and figures["run"]["validation_losses"] == {3: 4.5}
    assert [run["inter_node_bytes"] for run in figures["compared"].values()] == [0, 1, 2]
    assert figures["compared"]["lean"]["step_ms"] == 250 and figures["sample"].startswith("    def")


def test_the_file_says_how_it_was_made_and_under_which_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "quickstart.json"
    assert main(["--folder", str(folder), "--other-load", "a compiler", "--output", str(output)]) == 0
    stored = json.loads(output.read_text())
    assert stored["other_load"] == "a compiler" and stored["measured"] == "bash scripts/quickstart.sh --fresh"
    assert "| lean | 0.00 | 0.00 | 250 | 5.0000 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "content", "finding"),
    [
        ("seconds.json", None, "seconds.json cannot be read"),
        ("statistics.json", "", "statistics.json is not JSON"),
        ("log.jsonl", json.dumps(steps(7)[0]), "log.jsonl holds no validation"),
    ],
)
def test_what_an_interrupted_quickstart_left_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None, finding: str
) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(SystemExit):
        main(["--folder", str(folder)])
    assert finding in capsys.readouterr().err
