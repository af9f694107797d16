from pathlib import Path

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
    assert rows[2] == ["plain", "30", "8.00", "1.000", "16.00", "5.00", "105", "6.2500", "-"]
    assert rows[3] == ["ZeRO++", "20", "2.00", "0.250", "4.00", "5.00", "90", "6.7500", "6.8750"]


def test_a_file_without_an_iteration_and_a_wrong_number_of_names_are_refused(tmp_path: Path) -> None:
    empty = write_json_lines(tmp_path / "empty.jsonl", [{"iteration": 1, "validation_loss": 2.0}])
    for arguments, words in ((["--log-jsonl", empty], "no logged iteration"), (["--log-jsonl", empty, "--names", "a", "b"], "--names")):
        done = run_tool("compare_runs", *arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
