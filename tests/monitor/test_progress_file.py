"""progress.txt."""

from datetime import datetime

from megatron_zpp.monitor.progress_file import ProgressFile


def test_jobs_append_lines_of_time_job_ranks_and_event(tmp_path):
    moment = datetime(2026, 8, 3, 12, 0, 1)
    first = ProgressFile(tmp_path, "77", 64, now=lambda: moment)
    first.job_has_started()
    first.checkpoint_is_saved(500)
    ProgressFile(tmp_path, "", 8, now=lambda: moment).job_has_started()
    assert (tmp_path / "progress.txt").read_text().splitlines() == [
        "2026-08-03 12:00:01\tJob ID: 77\t# GPUs: 64\tStarting job",
        "2026-08-03 12:00:01\tJob ID: 77\t# GPUs: 64\tSaved checkpoint\tIteration: 500",
        "2026-08-03 12:00:01\tJob ID: \t# GPUs: 8\tStarting job",
    ]
