"""The batch files under a real Slurm of two nodes on this machine. Skipped where Slurm is not installed or the user is not root."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.real_slurm import Job, NoSlurm, Slurm, real_slurm
from harness.tiny_runs import TINY, losses

from megatron_zpp.data.indexed_dataset import IndexedDataset

pytestmark = [pytest.mark.long, pytest.mark.gloo]
SCRIPTS = ("slurm_srun.sbatch", "slurm_torchrun.sbatch")
EACH_SCRIPT = pytest.mark.parametrize("script", SCRIPTS)
SIZE = "--nodes 2 --gpus-per-node 0 --ntasks-per-node 1 --cpus-per-task 1 --time 90".split()
FLAGS = [*TINY, *"--zero-stage 3 --global-batch-size 4 --micro-batch-size 2".split()]
ITERATIONS = 200
ENDLESS = "1000000"
MIDDLE = 20  # iterations before a run is disturbed, far from its end


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    try:
        with real_slurm(tmp_path_factory.mktemp("slurm")) as running:
            yield running
    except NoSlurm as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Losses and gradient norms of the run that no test disturbs."""
    run = Run(slurm, tmp_path_factory.mktemp("undisturbed"), SCRIPTS[0])
    assert run.job.outcome() == ("COMPLETED", "0:0"), run.job.log
    assert "(2 nodes x 1 rank)" in run.job.log and f"done: iteration {ITERATIONS} is saved" in run.job.log
    assert run.iterations() == list(range(1, ITERATIONS + 1))
    return losses(run.records())


class Run:
    """A job that trains, one rank on each node, and what its run has written to `folder`."""

    def __init__(self, slurm: Slurm, folder: Path, script: str, *flags: str, options: tuple[str, ...] = (), **variables: str) -> None:
        self._log = folder / "log.jsonl"
        names = {"SAVE": str(folder / "saved"), "TRAIN_ITERS": str(ITERATIONS), "RANKS": "1"} | variables
        words = [*SIZE, *options, f"scripts/{script}", *FLAGS, *flags, "--log-jsonl", self._log]
        self.job = slurm.submit(*words, **names)

    def records(self) -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines(keepends=True) if self._log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def iterations(self) -> list[int]:
        return [record["iteration"] for record in self.records() if "lm_loss" in record]

    def wait_for_iteration(self, iteration: int) -> None:
        def is_there() -> bool:
            assert not self.job.has_ended(), self.job.log
            return any(done >= iteration for done in self.iterations())

        self.job.slurm.wait_for(f"iteration {iteration} of job {self.job.number}", is_there)

    def wait_for_end_of_ranks(self) -> None:
        self.job.slurm.wait_for(f"the end of the ranks of job {self.job.number}", lambda: not self.job.ranks())


@EACH_SCRIPT
def test_a_job_that_leaves_early_is_requeued_and_goes_on_with_the_losses_of_the_undisturbed_run(
    slurm: Slurm, tmp_path: Path, undisturbed: list[tuple[float, float]], script: str
) -> None:
    run = Run(slurm, tmp_path, script, "--exit-interval", str(ITERATIONS // 2))
    assert run.job.outcome() == ("COMPLETED", "0:0"), run.job.log
    assert run.job.facts()["Restarts"] == "1"
    assert f"iteration {ITERATIONS // 2} of {ITERATIONS} is saved" in run.job.log
    assert losses(run.records()) == undisturbed


def test_a_job_leaves_before_its_time_limit_with_a_checkpoint_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """The script's own --signal. Slurm looks at time limits every half minute, and shortens the limit of a running job at once."""
    run = Run(slurm, tmp_path, "slurm_srun.sbatch", options=("--time", "10"), TRAIN_ITERS=ENDLESS)
    run.wait_for_iteration(MIDDLE)
    slurm.said("scontrol", "update", f"JobId={run.job.number}", "TimeLimit=6")
    slurm.wait_for("a requeued job", lambda: run.job.facts()["Restarts"] == "1")
    left_at = run.iterations()[-1]
    assert f"iteration {left_at} of {ENDLESS} is saved" in run.job.log
    slurm.said("scontrol", "update", f"JobId={run.job.number}", "TimeLimit=10")
    slurm.wait_for("a second start", run.job.is_running)
    run.wait_for_iteration(left_at + 1)
    assert run.iterations()[left_at] == left_at + 1
    run.job.cancel()


@EACH_SCRIPT
def test_a_cancelled_job_saves_and_stays_away(slurm: Slurm, tmp_path: Path, script: str) -> None:
    run = Run(slurm, tmp_path, script, TRAIN_ITERS=ENDLESS)
    run.wait_for_iteration(MIDDLE)
    run.job.cancel()
    assert run.job.outcome() == ("CANCELLED", "0:15")
    run.wait_for_end_of_ranks()
    assert f"successfully saved checkpoint at iteration {run.iterations()[-1]:7d}" in run.job.log


@EACH_SCRIPT
def test_a_killed_rank_ends_the_job_as_failed(slurm: Slurm, tmp_path: Path, script: str) -> None:
    run = Run(slurm, tmp_path, script, TRAIN_ITERS=ENDLESS)
    run.wait_for_iteration(MIDDLE)
    os.kill(run.job.ranks()[-1], signal.SIGKILL)
    run.wait_for_end_of_ranks()
    assert run.job.outcome()[0] == "FAILED" and run.job.facts()["Restarts"] == "0"


@EACH_SCRIPT
def test_a_killed_srun_ends_its_ranks_and_the_job_as_failed(slurm: Slurm, tmp_path: Path, script: str) -> None:
    run = Run(slurm, tmp_path, script, TRAIN_ITERS=ENDLESS)
    run.wait_for_iteration(MIDDLE)
    for pid in run.job.processes("srun"):
        os.kill(pid, signal.SIGKILL)
    run.wait_for_end_of_ranks()
    assert run.job.outcome() == ("FAILED", "137:0")


@EACH_SCRIPT
def test_no_rank_outlives_a_killed_slurmstepd_but_the_job_runs_until_it_is_cancelled(slurm: Slurm, tmp_path: Path, script: str) -> None:
    run = Run(slurm, tmp_path, script, TRAIN_ITERS=ENDLESS)
    run.wait_for_iteration(MIDDLE)
    os.kill(run.job.step_daemons()[-1], signal.SIGKILL)
    run.wait_for_end_of_ranks()
    assert run.job.state() == "RUNNING"
    run.job.cancel()
    assert run.job.outcome() == ("CANCELLED", "0:15")


@pytest.mark.parametrize("script, partition", [(SCRIPTS[0], "low"), (SCRIPTS[1], "low"), (SCRIPTS[0], "graceless")])
def test_a_preempted_job_saves_and_goes_on_with_the_losses_of_the_undisturbed_run(
    slurm: Slurm, tmp_path: Path, undisturbed: list[tuple[float, float]], script: str, partition: str
) -> None:
    """Without a GraceTime Slurm ends the batch script, too, and puts the job back by itself."""
    run = Run(slurm, tmp_path, script, options=("--partition", partition))
    run.wait_for_iteration(MIDDLE)
    preempting = preempt(slurm)
    assert run.job.outcome() == ("COMPLETED", "0:0"), run.job.log
    assert run.job.facts()["Restarts"] == "1" and preempting.outcome() == ("COMPLETED", "0:0")
    assert ("is preempted and goes back into the queue" in run.job.log) is (partition == "low")
    assert run.job.log.count("successfully saved checkpoint") == 2 and losses(run.records()) == undisturbed


def test_a_job_that_is_preempted_before_its_first_step_goes_back_into_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    run = Run(slurm, tmp_path, "slurm_srun.sbatch", TRAIN_ITERS="1")
    slurm.wait_for("the start of the ranks", lambda: len(run.job.ranks()) == 2)
    preempt(slurm)
    assert run.job.outcome() == ("COMPLETED", "0:0"), run.job.log
    assert f"iteration 0 of 1 is saved in {tmp_path / 'saved'}; job {run.job.number} is preempted" in run.job.log
    assert "PreemptTime=None" in slurm.said("scontrol", "show", "job", run.job.number)


def preempt(slurm: Slurm) -> Job:
    """A job of higher priority that needs both nodes."""
    return slurm.submit("--partition", "high", "--nodes", "2", "--exclusive", "--wrap", "sleep 1")


def test_shares_of_a_corpus_are_joined_after_a_failed_share_was_repaired(slurm: Slurm, tmp_path: Path) -> None:
    good = "".join(f'{{"text": "{line}"}}\n' for line in range(40))
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a", "b", "c"):
        (texts / f"{name}.jsonl").write_text(good + ("{\n" if name == "b" else ""))

    def submit() -> Job:
        """The job that joins the shares."""
        command = [
            "bash",
            "scripts/slurm_preprocess.sh",
            texts,
            tmp_path / "corpus",
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            "50",
        ]
        options = f"--cpus-per-task 1 --output {slurm.folder}/job_%j.log"
        said = slurm.said(*command, SBATCH_OPTIONS=options)
        return Job(slurm, said.split()[-1])

    first = submit()
    slurm.wait_for("a job that is removed", lambda: first.state() == "CANCELLED")
    assert not list(tmp_path.glob("corpus_text_document.*"))
    (texts / "b.jsonl").write_text(good)
    second = submit()
    assert second.outcome() == ("COMPLETED", "0:0"), second.log
    assert len(IndexedDataset(str(tmp_path / "corpus_text_document"))) == 3 * 40
    logs = "".join(path.read_text() for path in slurm.folder.glob("job_*.log"))
    assert logs.count("b.jsonl, line 41: not JSON") == 1 and logs.count("done before") == 2


@pytest.mark.parametrize("script", [*SCRIPTS, "slurm_preprocess.sbatch", "slurm_merge.sbatch"])
def test_a_job_that_was_submitted_outside_the_repository_ends_with_one_sentence_and_code_2(
    slurm: Slurm, tmp_path: Path, script: str
) -> None:
    path = Path(__file__).parents[2] / "scripts" / script
    size = "--nodes 1 --gpus-per-node 0 --ntasks-per-node 1 --cpus-per-task 1".split()
    job = slurm.submit("--chdir", tmp_path, *size, path, "a", "b", "1", folder=tmp_path)
    assert job.outcome() == ("FAILED", "2:0")
    assert job.log.startswith(f"error: {tmp_path} is not the root of the repository") and len(job.log.splitlines()) == 1
