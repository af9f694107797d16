"""Runs the Slurm scripts with fakes of srun, scontrol and sbatch that record their calls."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness.fake_commands import REAL, ROOT, SBATCH, SCONTROL, SRUN, FakeCommands
from harness.interrupts import SLEEP
from harness.patience import PATIENCE_SECONDS, wait_until
from harness.tiny_corpus import write_corpus
from harness.tool import run_tool, write_json_lines
from harness.trained_tokenizers import write_gpt2_files
from torch.distributed.run import parse_args

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.preprocess.json_lines import find_inputs
from megatron_zpp.parallel.launch import Launch, read_launch

FLAGS = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --zero-stage 3 --keep-last 7".split()
MODELS = sorted(path.stem for path in (ROOT / "scripts" / "models").glob("*.sh"))
# A fake of a run that saves at iteration SAVED.
SAVES = """
folder = words[words.index("--save") + 1]
os.makedirs(folder, exist_ok=True)
open(os.path.join(folder, "latest_checkpointed_iteration.txt"), "w").write(os.environ["SAVED"])
"""


def cluster(tmp_path: Path, program: str = SAVES) -> FakeCommands:
    fakes = FakeCommands(tmp_path)
    fakes.add("getent")  # resolves every name
    fakes.add("srun", SRUN)
    fakes.add("scontrol", SCONTROL)
    fakes.add("python", program)
    fakes.add("torchrun", program)
    return fakes


def job(tmp_path: Path, ranks_per_node: int = 2, **more: str) -> dict[str, str]:
    """The variables that Slurm and the user set for a job of two nodes."""
    variables = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": str(2 * ranks_per_node),
        "SLURM_NTASKS_PER_NODE": str(ranks_per_node),
        "SLURM_CPUS_PER_TASK": "5",
        "SLURM_JOB_END_TIME": str(int(time.time()) + 3 * 3600 + 30),
        "SAVE": str(tmp_path / "saved"),
        "TRAIN_ITERS": "100",
        "SAVED": "100",
    }
    return variables | more


def submitted(tmp_path: Path, name: str) -> Path:
    """The copy of a script that Slurm runs."""
    copy = tmp_path / "slurm_script"
    copy.write_text((ROOT / "scripts" / name).read_text())
    return copy


def run_of(words: list[str], launch: Launch) -> Config:
    """The configuration of a run with these words after the training script's name."""
    return resolve(parse_flags(words[words.index("pretrain_zeropp_gpt.py") + 1 :]), launch.world_size, launch.local_world_size)


def test_srun_starts_a_rank_per_task_that_finds_its_place_and_the_flags(tmp_path: Path) -> None:
    fakes = cluster(tmp_path)
    done = fakes.run("bash", submitted(tmp_path, "slurm_srun.sbatch"), *FLAGS, **job(tmp_path))
    assert done.returncode == 0, done.stderr
    (srun,) = fakes.calls("srun")
    assert srun.words[:4] == ["--kill-on-bad-exit=1", "--gpu-bind=none", "--cpus-per-task", "5"]
    ranks = fakes.calls("python")
    launches = [read_launch(rank.environment) for rank in ranks]
    assert launches == [Launch(rank, 4, rank % 2, 2, "node3", 15000 + 1234567 % 15000) for rank in range(4)]
    assert {rank.folder for rank in ranks} == {str(ROOT)} and all(rank.environment["NCCL_DEBUG"] == "WARN" for rank in ranks)
    config = run_of(ranks[3].words, launches[3])
    assert (config.training.train_iters, config.training.exit_signal_handler, config.zero.zero_stage) == (100, True, 3)
    assert config.checkpoint.save == config.checkpoint.load == str(tmp_path / "saved")
    assert config.checkpoint.keep_last == 7  # the user's flags win over those of the script


def test_one_torchrun_per_node_starts_the_ranks_of_its_node(tmp_path: Path) -> None:
    fakes = cluster(tmp_path)
    done = fakes.run("bash", submitted(tmp_path, "slurm_torchrun.sbatch"), *FLAGS, **job(tmp_path, 1, RANKS="8"))
    assert done.returncode == 0, done.stderr
    calls = fakes.calls("torchrun")
    places = [parse_args(call.words) for call in calls]
    assert [(place.node_rank, place.nnodes, place.nproc_per_node) for place in places] == [(0, "2", "8"), (1, "2", "8")]
    assert {(place.master_addr, place.master_port) for place in places} == {("node3", 15000 + 1234567 % 15000)}
    config = run_of(calls[1].words, Launch(8, 16, 0, 8))
    assert config.training.exit_duration_in_mins == 3 * 60 - 20 and config.training.exit_signal_handler
    assert (config.training.train_iters, config.checkpoint.keep_last) == (100, 7)


SRUN_JOB, TORCHRUN_JOB = ("slurm_srun.sbatch", 2), ("slurm_torchrun.sbatch", 1)


# Both end in scripts/slurm_run.sh, which decides.
@pytest.mark.parametrize(
    "name, ranks_per_node, before, saved, code, requeued, said",
    [
        (*SRUN_JOB, "", "100", 0, False, "done: iteration 100"),
        (*TORCHRUN_JOB, "", "100", 0, False, "done: iteration 100"),
        (*SRUN_JOB, "", "40", 0, True, "iteration 40 of 100"),
        (*TORCHRUN_JOB, "40", "70", 0, True, "iteration 70 of 100"),
        (*SRUN_JOB, "40", "40", 1, False, "nothing was saved beyond iteration 40"),
        (*TORCHRUN_JOB, "40", "40", 1, False, "nothing was saved beyond iteration 40"),
        (*TORCHRUN_JOB, "70", "40", 0, True, "iteration 40 of 100"),  # 70 is damaged, and --load-last-good-checkpoint has passed it over
        (*TORCHRUN_JOB, "release", "40", 0, True, "iteration 40 of 100"),
        (*TORCHRUN_JOB, "release", "release", 1, False, "nothing was saved beyond iteration 0"),
    ],
)
def test_a_job_goes_back_into_the_queue_as_long_as_it_makes_progress_towards_its_end(
    tmp_path: Path, name: str, ranks_per_node: int, before: str, saved: str, code: int, requeued: bool, said: str
) -> None:
    fakes = cluster(tmp_path)
    if before:
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(before)
    done = fakes.run("bash", submitted(tmp_path, name), *FLAGS, **job(tmp_path, ranks_per_node, SAVED=saved))
    assert done.returncode == code and said in done.stdout + done.stderr
    assert (["requeue", "1234567"] in [call.words for call in fakes.calls("scontrol")]) is requeued


@pytest.mark.parametrize(
    "words, named",
    [
        ("--save elsewhere", "--save elsewhere is not SAVE={saved}; the job resumes from the folder"),
        ("--load=elsewhere", "--load elsewhere is not SAVE={saved}; the job resumes from the folder"),
        ("--train-iters 5", "--train-iters 5 is not TRAIN_ITERS=100, which ends the job; give the same number"),
        ("--train-samples 5", "--train-samples cannot be used with this script, which counts iterations; give --train-iters"),
        ("--train-tokens=5", "--train-tokens cannot be used with this script, which counts iterations; give --train-iters"),
        ("--finetune", "--finetune would begin at iteration 0 each time this job is repeated; name the weights with --pretrained-"),
        ("--ckpt-step=5", "--ckpt-step would go back to the same iteration each time this job is repeated; write the iteration into"),
    ],
)
def test_a_flag_that_contradicts_what_the_queue_goes_by_is_refused(tmp_path: Path, words: str, named: str) -> None:
    fakes = cluster(tmp_path)
    done = fakes.run("bash", submitted(tmp_path, "slurm_srun.sbatch"), *FLAGS, *words.split(), **job(tmp_path))
    assert done.returncode == 2 and named.format(saved=tmp_path / "saved") in done.stderr
    assert not fakes.calls("srun")


@pytest.mark.parametrize("folder, loads_last_good", [("iter_0000040", True), ("iter_0000040.tmp-ab12", False)])
def test_a_job_goes_on_from_checkpoints_of_which_none_is_named_as_the_latest(tmp_path: Path, folder: str, loads_last_good: bool) -> None:
    fakes = cluster(tmp_path)
    (tmp_path / "saved" / folder).mkdir(parents=True)
    done = fakes.run("bash", submitted(tmp_path, "slurm_srun.sbatch"), *FLAGS, **job(tmp_path, SAVED="50"))
    assert done.returncode == 0, done.stderr
    config = run_of(fakes.calls("python")[0].words, Launch(0, 4, 0, 2))
    assert config.checkpoint.load_last_good_checkpoint is loads_last_good


@pytest.mark.parametrize("name, ranks_per_node", [("slurm_srun.sbatch", 2), ("slurm_torchrun.sbatch", 1)])
@pytest.mark.parametrize("saved, said", [("50", "done: iteration 50"), ("40", "iteration 40 of 50 is saved")])
def test_the_flags_of_a_run_say_where_and_until_when_it_saves(
    tmp_path: Path, name: str, ranks_per_node: int, saved: str, said: str
) -> None:
    fakes, folder = cluster(tmp_path), tmp_path / "of flags"
    words = ["--save", folder, f"--load={folder}", "--train-iters", "7", "--train-iters=50", "--persistent-save-interval", "5"]
    done = fakes.run(
        "bash", submitted(tmp_path, name), *FLAGS, *words, **job(tmp_path, ranks_per_node, SAVE="", TRAIN_ITERS="", SAVED=saved)
    )
    assert done.returncode == 0 and said in done.stdout, done.stderr
    config = run_of([*fakes.calls("python"), *fakes.calls("torchrun")][0].words, Launch(0, 4, 0, 2))
    assert (config.training.train_iters, config.checkpoint.save, config.checkpoint.load) == (50, str(folder), str(folder))
    assert config.checkpoint.save_interval == 5


@pytest.mark.parametrize("name, ranks_per_node", [("slurm_srun.sbatch", 2), ("slurm_torchrun.sbatch", 1)])
def test_a_run_that_fails_is_not_repeated_and_its_exit_code_is_the_jobs(tmp_path: Path, name: str, ranks_per_node: int) -> None:
    fakes = cluster(tmp_path, "sys.exit(3)")
    done = fakes.run("bash", submitted(tmp_path, name), *FLAGS, **job(tmp_path, ranks_per_node))
    assert done.returncode == 3
    assert not [call for call in fakes.calls("scontrol") if call.words[0] == "requeue"]


@pytest.mark.parametrize("name, ranks_per_node", [("slurm_srun.sbatch", 2), ("slurm_torchrun.sbatch", 1)])
@pytest.mark.parametrize("saved", ["", "40"])
def test_a_preempted_job_goes_back_into_the_queue_whatever_its_ranks_could_save(
    tmp_path: Path, name: str, ranks_per_node: int, saved: str
) -> None:
    """Slurm signals the ranks of a preempted job, which may not have begun to train, and would take a job that then fails as ended."""
    fakes = cluster(tmp_path, (SAVES if saved else "") + "sys.exit(143)")
    fakes.add("scontrol", SCONTROL + '\nif words[:2] == ["show", "job"]: print("PreemptTime=2026-01-02T03:04:05")')
    done = fakes.run("bash", submitted(tmp_path, name), *FLAGS, **job(tmp_path, ranks_per_node, SAVED=saved))
    assert done.returncode == 0, done.stderr
    assert f"iteration {saved or 0} of 100 is saved in {tmp_path / 'saved'}; job 1234567 is preempted" in done.stdout
    assert [call.words for call in fakes.calls("scontrol")][-1] == ["requeue", "1234567"]


@pytest.mark.parametrize("name", ["slurm_srun.sbatch", "slurm_torchrun.sbatch"])
@pytest.mark.parametrize(
    "missing, sentence",
    [("SLURM_SUBMIT_DIR", "SLURM_SUBMIT_DIR: submit"), ("SAVE", "SAVE is not set"), ("TRAIN_ITERS", "TRAIN_ITERS is not set")],
)
def test_what_is_not_set_is_named(tmp_path: Path, name: str, missing: str, sentence: str) -> None:
    variables = {key: value for key, value in job(tmp_path).items() if key != missing}
    done = cluster(tmp_path).run("bash", submitted(tmp_path, name), *FLAGS, **variables)
    assert done.returncode != 0 and sentence in done.stderr


@pytest.mark.parametrize(
    "variable, value, sentence",
    [
        ("TRAIN_ITERS", "a[$(touch planted)]", "TRAIN_ITERS=a[$(touch planted)] is not a whole number"),
        ("TRAIN_ITERS", "0", "TRAIN_ITERS=0 is not a whole number from 1"),
        ("SAVE", "-rf", "SAVE -rf begins with a dash"),
        ("MODEL", "../../elsewhere", "MODEL=../../elsewhere has no file"),
        ("MODEL", "gpt5", "MODEL=gpt5 has no file scripts/models/gpt5.sh"),
        ("EXIT_MINUTES", "a[$(touch planted)]", "EXIT_MINUTES=a[$(touch planted)] is not a whole number"),
    ],
)
def test_a_value_that_bash_or_a_program_would_read_otherwise_is_refused(tmp_path: Path, variable: str, value: str, sentence: str) -> None:
    fakes = cluster(tmp_path)
    done = fakes.run("bash", submitted(tmp_path, "slurm_torchrun.sbatch"), *FLAGS, **job(tmp_path, 1, **{variable: value}))
    assert done.returncode == 2 and sentence in done.stderr
    assert not fakes.calls("srun") and not (ROOT / "planted").exists()


def node_of_torchrun(tmp_path: Path, torchrun: str) -> tuple[subprocess.Popen[str], Path]:
    """slurm_torchrun_node.sh with this program as torchrun, once it runs, and the file in which the program writes its process id.

    The script's parent is a bash, which stands for slurmstepd.
    """
    fakes = FakeCommands(tmp_path)
    fakes.add("torchrun", f"import signal, time\n{torchrun}")
    started = tmp_path / "started"
    command = ["bash", "-c", "bash scripts/slurm_torchrun_node.sh & wait $!"]
    environment = {"PATH": f"{fakes.folder}:{REAL}", "SLURM_NODEID": "1", "MASTER_ADDR": "127.0.0.1", "STARTED": str(started)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: process.poll() is not None or (started.exists() and started.read_text() != ""), "torchrun does not start")
    assert process.poll() is None
    return process, started


WRITES_PID = 'open(os.environ["STARTED"], "w").write(str(os.getpid()))'
LEAVES_AT_SIGTERM = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({{code}}))\n{WRITES_PID}\n{SLEEP}"


def test_a_torchrun_that_slurm_has_ended_is_no_failure(tmp_path: Path) -> None:
    """Slurm signals every process of a step. torchrun's own exit code is then 1, although its ranks have saved."""
    process, started = node_of_torchrun(tmp_path, LEAVES_AT_SIGTERM.format(code=1))
    os.kill(parent_of(int(started.read_text())), signal.SIGTERM)
    os.kill(int(started.read_text()), signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (0, "")


def test_a_torchrun_that_fails_without_a_signal_is_a_failure(tmp_path: Path) -> None:
    process, _ = node_of_torchrun(tmp_path, f"{WRITES_PID}\ntime.sleep(0.5)\nsys.exit(7)")
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (7, "")


def test_a_node_that_cannot_resolve_the_first_one_says_so_and_starts_no_torchrun(tmp_path: Path) -> None:
    fakes = cluster(tmp_path)
    fakes.add("getent", "sys.exit(2)")
    done = fakes.run("bash", submitted(tmp_path, "slurm_torchrun.sbatch"), *FLAGS, **job(tmp_path, 1))
    assert done.returncode == 2 and "error: MASTER_ADDR=node3 cannot be resolved on" in done.stderr
    assert not fakes.calls("torchrun")


def test_torchrun_does_not_outlive_the_slurmstepd_of_its_node(tmp_path: Path) -> None:
    process, _ = node_of_torchrun(tmp_path, LEAVES_AT_SIGTERM.format(code=1))
    process.kill()
    # The standard error of all processes ends with the last of them.
    assert process.stderr is not None and process.stderr.read() == ""
    process.wait()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_older_slurm_says_to_squeue_when_the_job_ends(tmp_path: Path) -> None:
    fakes = cluster(tmp_path)
    fakes.add("squeue", 'import time; print(time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 7230)))')
    variables = {key: value for key, value in job(tmp_path, 1).items() if key != "SLURM_JOB_END_TIME"}
    done = fakes.run("bash", submitted(tmp_path, "slurm_torchrun.sbatch"), *FLAGS, **variables)
    assert done.returncode == 0, done.stderr
    words = fakes.calls("torchrun")[0].words
    assert words[words.index("--exit-duration-in-mins") + 1] == "100"


@pytest.mark.parametrize(
    "name, ranks_per_node, seconds", [("slurm_torchrun.sbatch", 1, 600), ("slurm_srun.sbatch", 2, 290), ("slurm_srun.sbatch", 2, 350)]
)
def test_a_job_that_is_too_short_to_save_before_its_end_is_refused(tmp_path: Path, name: str, ranks_per_node: int, seconds: int) -> None:
    fakes, soon = cluster(tmp_path), {"SLURM_JOB_END_TIME": str(int(time.time()) + seconds)}
    done = fakes.run("bash", submitted(tmp_path, name), *FLAGS, **job(tmp_path, ranks_per_node, **soon))
    assert done.returncode == 2 and "more --time" in done.stderr and not fakes.calls("srun")


def test_a_job_with_a_shorter_signal_may_be_shorter(tmp_path: Path) -> None:
    fakes, soon = cluster(tmp_path), {"SLURM_JOB_END_TIME": str(int(time.time()) + 200), "SIGNAL_SECONDS": "60"}
    assert fakes.run("bash", submitted(tmp_path, "slurm_srun.sbatch"), *FLAGS, **job(tmp_path, **soon)).returncode == 0


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "scripts").glob("*.sbatch")))
def test_a_job_that_was_submitted_elsewhere_says_where_to_submit_it(tmp_path: Path, name: str) -> None:
    done = cluster(tmp_path).run("bash", submitted(tmp_path, name), *FLAGS, **job(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path)))
    remedies = {"slurm_srun": "submit the job from there.", "slurm_torchrun": "submit the job from there."}
    remedy = remedies.get(name.split(".")[0], "start scripts/slurm_preprocess.sh there.")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} is not the root of the repository; change to it, and {remedy}\n"


@pytest.mark.parametrize("name", ["slurm_preprocess.sbatch", "slurm_merge.sbatch"])
def test_a_part_of_preprocessing_that_was_submitted_alone_says_what_submits_it(tmp_path: Path, name: str) -> None:
    done = cluster(tmp_path).run("bash", submitted(tmp_path, name), **job(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and done.stderr.endswith("; start scripts/slurm_preprocess.sh, which submits this.\n")


@pytest.mark.parametrize("name", ["slurm_srun.sbatch", "slurm_torchrun.sbatch"])
@pytest.mark.parametrize("variable", ["SAVE", "TRAIN_ITERS"])
def test_a_variable_that_is_not_set_is_a_mistake(tmp_path: Path, name: str, variable: str) -> None:
    done = cluster(tmp_path).run("bash", submitted(tmp_path, name), *FLAGS, **job(tmp_path, **{variable: ""}))
    assert done.returncode == 2 and f"error: {variable} is not set; set it to" in done.stderr


def test_logs_of_jobs_are_no_files_of_the_repository() -> None:
    scripts = [path.read_text() for path in (ROOT / "scripts").glob("*.sbatch")]
    names = [f"{text.split('--job-name=')[1].split()[0]}_7.log" for text in scripts]
    ignored = subprocess.run(["git", "check-ignore", "--no-index", *names], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert len(names) == 4 and ignored.split() == names


@pytest.mark.parametrize("model", MODELS[:1])
def test_a_published_shape_is_chosen_by_name(tmp_path: Path, model: str) -> None:
    fakes = cluster(tmp_path)
    done = fakes.run("bash", submitted(tmp_path, "slurm_srun.sbatch"), **job(tmp_path, MODEL=model))
    assert done.returncode == 0, done.stderr
    assert run_of(fakes.calls("python")[0].words, Launch(0, 4, 0, 2)).model.num_layers > 2


def preprocessing(tmp_path: Path) -> FakeCommands:
    """The real tools behind a fake sbatch."""
    fakes = FakeCommands(tmp_path)
    fakes.add("sbatch", SBATCH)
    fakes.add_python()
    return fakes


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.{ending}").read_bytes() for ending in ("bin", "idx")]


def one_process(folder: Path, prefix: Path, *flags: str) -> None:
    """What the pipeline has to be equal to."""
    done = run_tool("preprocess_data", "--input", folder, "--output-prefix", prefix, "--workers", 1, *flags)
    assert done.returncode == 0, done.stderr


def test_an_array_of_shares_merged_is_one_corpus_byte_for_byte(tmp_path: Path) -> None:
    """Two shares of five files, the array's tasks in reverse order."""
    texts = tmp_path / "texts"
    make_folder(texts / "more")
    for number in range(5):
        folder = texts if number % 2 else texts / "more"
        (folder / f"text{number}.jsonl").write_text("".join(f'{{"text": "{number} {line}"}}\n' for line in range(number + 1)))
    fakes = preprocessing(tmp_path)
    flags = "--tokenizer-type NullTokenizer --vocab-size 50 --append-eod".split()
    options = {"SHARES": "2", "SBATCH_OPTIONS": "--partition cpu"}
    for attempt in range(2):  # the second finds all shares done
        done = fakes.run("bash", "scripts/slurm_preprocess.sh", texts, tmp_path / "corpus", *flags, **options)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("was done before") == 2 * attempt
    array, merge = fakes.calls("sbatch")[:2]
    assert array.words[:5] == ["--parsable", "--partition", "cpu", "--array", "0-1"]
    assert merge.words[:6] == ["--partition", "cpu", "--dependency", "afterok:70", "--kill-on-invalid-dep", "yes"]

    one_process(texts, tmp_path / "whole", *flags)
    assert content(tmp_path / "corpus_text_document") == content(tmp_path / "whole_text_document")


def test_a_share_whose_input_was_repaired_is_done_by_the_same_command(tmp_path: Path) -> None:
    texts = make_folder(tmp_path / "texts")
    good = "".join(f'{{"text": "{line}"}}\n' for line in range(40))
    fakes = preprocessing(tmp_path)
    command = ["bash", "scripts/slurm_preprocess.sh", texts, tmp_path / "corpus", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]
    (texts / "a.jsonl").write_text(good + good)
    (texts / "b.jsonl").write_text(good + "{\n")
    failed = fakes.run(*command, SHARES="1")
    assert failed.returncode != 0 and "b.jsonl, line 41: not JSON" in failed.stderr
    assert (tmp_path / "corpus_parts" / "part_0000.unfinished").exists()
    for name in ("a.jsonl", "b.jsonl"):
        (texts / name).write_text(good)
    done = fakes.run(*command, SHARES="1")
    assert done.returncode == 0, done.stderr
    assert "a.jsonl has changed" in done.stderr and "--restart-if-changed: starting at the beginning" in done.stderr
    assert len(IndexedDataset(str(tmp_path / "corpus_text_document"))) == 80


def test_a_share_is_done_again_if_its_tokenizer_was_trained_anew(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    write_json_lines(make_folder(texts) / "a.jsonl", [{"text": "aaaa bbbb"}])
    fakes = preprocessing(tmp_path)
    flags = f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt".split()
    found = []
    for sample in ("aaaa aaaa", "bbbb bbbb"):
        write_gpt2_files(tmp_path, 260, [sample])
        done = fakes.run("bash", "scripts/slurm_preprocess.sh", texts, tmp_path / "corpus", *flags, SHARES="1")
        assert done.returncode == 0, done.stderr
        found.append(content(tmp_path / "corpus_text_document"))
    one_process(texts, tmp_path / "whole", *flags)
    assert found[0] != found[1] == content(tmp_path / "whole_text_document")


def test_only_the_keys_of_the_last_command_are_joined(tmp_path: Path) -> None:
    texts, parts = make_folder(tmp_path / "texts"), make_folder(tmp_path / "corpus_parts")
    write_json_lines(texts / "a.jsonl", [{"text": "1", "title": "2"}])
    write_corpus(parts, [[2]], name="part_0000_title_document")  # as a command with --json-keys text title left it
    flags = "--tokenizer-type NullTokenizer --vocab-size 50 --json-keys text".split()
    done = preprocessing(tmp_path).run("bash", "scripts/slurm_preprocess.sh", texts, tmp_path / "corpus", *flags)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("corpus_*")) == [
        "corpus_parts",
        "corpus_text_document.bin",
        "corpus_text_document.idx",
    ]


def test_shares_without_text_leave_the_corpus_that_of_one_process(tmp_path: Path) -> None:
    texts = make_folder(tmp_path / "texts")
    for name, lines in [("a", [{"text": "", "title": ""}]), ("b", []), ("c", [{"text": "1", "title": ""}, {"text": "", "title": ""}])]:
        write_json_lines(texts / f"{name}.jsonl", lines)
    flags = "--tokenizer-type NullTokenizer --vocab-size 50 --append-eod --json-keys text title".split()
    done = preprocessing(tmp_path).run("bash", "scripts/slurm_preprocess.sh", texts, tmp_path / "corpus", *flags)
    assert done.returncode == 0, done.stderr
    one_process(texts, tmp_path / "whole", *flags)
    for key in ("text", "title"):
        assert content(tmp_path / f"corpus_{key}_document") == content(tmp_path / f"whole_{key}_document")


def test_a_folder_has_the_files_that_it_has_for_one_process(tmp_path: Path) -> None:
    """Links are followed, also that of the folder itself, and hidden files count."""
    real, elsewhere = make_folder(tmp_path / "real"), make_folder(tmp_path / "elsewhere")
    for path in (real / "b.jsonl", real / ".a.json", real / "more.txt", elsewhere / "c.jsonl.gz", tmp_path / "d.jsonl"):
        path.write_bytes(gzip.compress(b"") if path.suffix == ".gz" else b"")
    (real / "C").symlink_to(elsewhere)
    (real / "d.jsonl").symlink_to(tmp_path / "d.jsonl")
    (tmp_path / "texts").symlink_to(real)
    fakes = preprocessing(tmp_path)
    fakes.add("sbatch")
    done = fakes.run("bash", "scripts/slurm_preprocess.sh", tmp_path / "texts", tmp_path / "corpus")
    assert done.returncode == 0 and "1 file with another ending is not read" in done.stderr
    listed = (tmp_path / "corpus_parts" / "files").read_text().split("\0")
    assert listed == [f"{tmp_path}/texts/{name}" for name in (".a.json", "C/c.jsonl.gz", "b.jsonl", "d.jsonl")] + [""]
    assert listed[:-1] == find_inputs([f"{tmp_path}/texts"], print)
    assert fakes.calls("sbatch")[0].words[2] == "0-3"


@pytest.mark.parametrize(
    "words, shares, sentence",
    [
        (["-delete", "out"], "1", "FOLDER -delete begins with a dash"),
        (["texts", "-out"], "1", "OUTPUT_PREFIX -out begins with a dash"),
        (["none", "out"], "1", "none is not a folder"),
        (["texts"], "1", "give a folder of JSON lines and the prefix"),
        (["texts", "out"], "a[$(touch planted)]", "SHARES=a[$(touch planted)] is not a number from 1 to 2, which"),
    ],
)
def test_preprocessing_refuses_words_that_a_program_would_read_as_flags(
    tmp_path: Path, words: list[str], shares: str, sentence: str
) -> None:
    """Runs in a copy of the repository's scripts, because one of these words once deleted the folder it ran in."""
    fakes = FakeCommands(tmp_path)
    fakes.add("sbatch")
    fakes.add("python", r'print("texts/a.jsonl\0texts/b.jsonl\0", end="")')
    folder = tmp_path / "repository"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "texts").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / "texts" / name).write_text("{}")
    before = sorted(folder.rglob("*"))
    done = fakes.run("bash", "scripts/slurm_preprocess.sh", *words, folder=folder, SHARES=shares)
    assert done.returncode == 2 and sentence in done.stderr
    assert sorted(folder.rglob("*")) == before and not fakes.calls("sbatch")


def test_names_of_files_may_hold_spaces_quotes_and_newlines(tmp_path: Path) -> None:
    texts = make_folder(tmp_path / "my texts")
    for name in ("a b.jsonl", "c'd\"$(touch planted).jsonl", "e\nf.jsonl", os.fsdecode(b"\xff.jsonl")):
        (texts / name).write_text('{"text": "1"}')
    flags = "--tokenizer-type NullTokenizer --vocab-size 50".split()
    done = preprocessing(tmp_path).run("bash", "scripts/slurm_preprocess.sh", texts, tmp_path / "my\ncorpus", *flags, SHARES="1")
    assert done.returncode == 0, done.stderr
    assert len(IndexedDataset(str(tmp_path / "my\ncorpus_text_document"))) == 4
    assert not (ROOT / "planted").exists()


def test_a_folder_without_text_and_too_many_shares_are_refused(tmp_path: Path) -> None:
    fakes = preprocessing(tmp_path)
    fakes.add("sbatch")
    empty = fakes.run("bash", "scripts/slurm_preprocess.sh", tmp_path / "bin", tmp_path / "corpus")
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    many = fakes.run("bash", "scripts/slurm_preprocess.sh", tmp_path, tmp_path / "corpus", SHARES="2")
    assert (empty.returncode, many.returncode) == (2, 2)
    assert (
        "bin is a folder without files that end in .jsonl" in empty.stderr and "SHARES=2 is not a number from 1 to 1, which" in many.stderr
    )
    assert not fakes.calls("sbatch")
