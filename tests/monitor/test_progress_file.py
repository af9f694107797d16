"""progress.txt."""

import os
from datetime import datetime

import pytest

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


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.with_name("victim"))])
def test_a_link_or_a_pipe_is_neither_written_through_nor_waited_for(tmp_path, make):
    (tmp_path / "victim").write_text("kept")
    make(tmp_path / "progress.txt")
    with pytest.raises(OSError, match="it is .*progress.txt"):
        ProgressFile(tmp_path, "", 8).job_has_started()
    assert (tmp_path / "victim").read_text() == "kept"
