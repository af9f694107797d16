from pathlib import Path

import pytest
from harness.tool import run_tool, write_json_lines


def steps(inter_node_bytes: int, losses: list[float], milliseconds: list[float]) -> list[dict[str, float]]:
    traffic = {"inter_node_bytes": inter_node_bytes, "intra_node_bytes": 2 * inter_node_bytes, "model_state_bytes": 5_000_000}
    return [
        {"iteration": 10 * index, "lm_loss": loss, "elapsed_ms_per_iteration": ms, **traffic}
        for index, (loss, ms) in enumerate(zip(losses, milliseconds, strict=True), start=1)
    ]


def test_runs_stand_side_by_side_with_their_share_of_the_first_ones_bytes(tmp_path: Path) -> None:
    plain = write_json_lines(tmp_path / "plain.jsonl", steps(8_000_000, [7.0, 6.5, 6.25], [900, 100, 110]))
    both = write_json_lines(
        tmp_path / "both.jsonl", [*steps(2_000_000, [7.0, 6.75], [800, 90]), {"iteration": 20, "validation_loss": 6.875}]
    )
    done = run_tool("compare_runs", "--log-jsonl", plain, both, "--names", "plain", "ZeRO++")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert rows[0][2:5] == ["MB into a node in the last step", "share of the first run", "MB into a rank in its node in the last step"]
    assert rows[2] == ["plain", "30", "8.00", "1.000", "16.00", "5.00", "105", "6.2500", "-"]
    assert rows[3] == ["ZeRO++", "20", "2.00", "0.250", "4.00", "5.00", "90", "6.7500", "6.8750"]


def test_a_run_has_no_share_of_a_first_run_that_sends_nothing(tmp_path: Path) -> None:
    logs = [write_json_lines(tmp_path / f"{nbytes}.jsonl", steps(nbytes, [7.0], [90])) for nbytes in (0, 2_000_000)]
    done = run_tool("compare_runs", "--log-jsonl", *logs, "--names", "one node", "two nodes")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert rows[2][:4] == ["one node", "10", "0.00", "-"] and rows[3][:4] == ["two nodes", "10", "2.00", "-"]


def test_each_validation_set_has_a_column_and_a_name_cannot_add_one(tmp_path: Path) -> None:
    books = {"iteration": 10, "validation_loss": 6.5, "validation_set": "books"}
    code = {"iteration": 10, "validation_loss": 5.5, "validation_set": "code"}
    both = write_json_lines(tmp_path / "both.jsonl", [*steps(1, [7.0], [1]), books, code])
    one = write_json_lines(tmp_path / "one.jsonl", [*steps(1, [7.0], [1]), code])
    done = run_tool("compare_runs", "--log-jsonl", both, one, "--names", "a|b", "one")
    rows = [line.split(" | ") for line in done.stdout.splitlines()[:4]]
    assert [rows[0][-2].strip(), rows[0][-1].strip(" |")] == ["validation books", "validation code"]
    assert [[cell.strip(" |") for cell in row[-2:]] for row in rows[2:]] == [["6.5000", "5.5000"], ["-", "5.5000"]]
    assert len(rows[2]) == len(rows[0]) and rows[2][0].startswith("| a\\|b")


def test_a_file_without_an_iteration_and_a_wrong_number_of_names_are_refused(tmp_path: Path) -> None:
    empty = write_json_lines(tmp_path / "empty.jsonl", [{"iteration": 1, "validation_loss": 2.0}])
    for arguments, words in ((["--log-jsonl", empty], "no training iteration"), (["--log-jsonl", empty, "--names", "a", "b"], "--names")):
        done = run_tool("compare_runs", *arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_runs_are_compared_at_the_worst_final_loss_and_what_was_not_logged_is_said(tmp_path: Path) -> None:
    logged = {"interval_iterations": 10, "inter_node_bytes_per_iteration": 2e6}
    new = [record | logged | {"consumed_tokens": 100 * record["iteration"]} for record in steps(1, [7.0, 6.5, 6.25], [900, 100, 110])]
    paths = [
        write_json_lines(tmp_path / "new.jsonl", new),
        write_json_lines(tmp_path / "old.jsonl", steps(1, [8.0, 7.5, 6.5], [1, 1, 1])),
    ]
    done = run_tool("compare_runs", "--log-jsonl", *paths)
    assert done.returncode == 0 and "a training loss of at most 6.5000" in done.stdout, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[-2:]]
    assert rows == [["new", "20", "2000", "10.0", "40.0"], ["old", "30", "not logged", "not logged", "not logged"]]
    done = run_tool("compare_runs", "--log-jsonl", *paths, "--at-loss", "6.3")
    assert [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")] == ["old", "not reached", "-", "-", "-"]


@pytest.mark.parametrize("loss", ["nan", "-1", "0", "1e999", "low"])
def test_a_loss_that_no_run_can_have_is_refused_with_its_flag_value_rule_and_remedy(tmp_path: Path, loss: str) -> None:
    log = write_json_lines(tmp_path / "log.jsonl", steps(1, [7.0], [1]))
    done = run_tool("compare_runs", "--log-jsonl", log, f"--at-loss={loss}")
    rule = f"argument --at-loss: {loss} is not a training loss; give a finite number above 0, in nats per token"
    assert done.returncode == 2 and rule in done.stderr and done.stdout == ""


def test_runs_without_a_finite_loss_are_not_compared_at_one(tmp_path: Path) -> None:
    done = run_tool("compare_runs", "--log-jsonl", write_json_lines(tmp_path / "log.jsonl", steps(1, [float("nan")], [1])))
    assert done.returncode == 0 and "No run ends with a finite loss" in done.stdout
