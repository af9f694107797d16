"""tools/launch.py: the commands of every host, forwarded signals and exit codes, and a real run with an ssh to this machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.fake_commands import ROOT, FakeCommands
from harness.interrupts import SLEEP
from harness.patience import PATIENCE_SECONDS, wait_until
from harness.rank_pool import free_port
from harness.tiny_runs import TINY
from launch import visible_gpus
from launching.host_commands import Program, Rendezvous, host_commands
from launching.hostfile import Host
from torch.distributed.run import parse_args

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.parallel.job_ids import JOB_VARIABLE

# An ssh for a cluster whose hosts are all this machine: a shell runs the words after the host's name, as sshd does.
SSH = """
host = next(i for i, word in enumerate(words) if word in ("nodea", "nodeb", "nodec"))
os.environ["FAKE_HOST"] = words[host]
os.execvp("bash", ["bash", "-c", " ".join(words[host + 1:])])
"""
HOSTS = "nodea slots=2\nnodeb slots=2 # the second\n#nodec slots=2\n"
# Replaces torchrun: runs the program in the file of its host.
PYTHON = """
exec(open(os.path.join(os.path.dirname({log!r}), os.environ["FAKE_HOST"] + ".py")).read())
"""
WAITS = f"import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({{code}}))\nopen({{ready!r}}, 'w')\n{SLEEP}"


def launcher(tmp_path: Path, hosts: str = HOSTS) -> tuple[FakeCommands, list[str]]:
    fakes = FakeCommands(tmp_path)
    fakes.add("ssh", SSH)
    fakes.add("torchrun_of_host", PYTHON)
    (tmp_path / "hosts").write_text(hosts)
    return fakes, [sys.executable, "tools/launch.py", "--hostfile", str(tmp_path / "hosts")]


def shown(fakes: FakeCommands, words: list[str], **variables: str) -> list[list[str]]:
    """The command of each host, as --dry-run prints it."""
    done = fakes.run(*words, HOME=str(fakes.folder), **variables)
    assert done.returncode == 0, done.stderr
    assert not fakes.calls("ssh")
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    return [shlex.split(line[-1]) if line[0] == "ssh" else line for line in lines]


def test_each_host_gets_one_torchrun_with_its_place_and_the_flags(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path)
    flags = ["--data-path", "0.3", "my corpus", "--num-layers", "2"]
    first, second = shown(
        fakes, [*words, "--dry-run", "--master_port", "6000", "pretrain_zeropp_gpt.py", *flags], NCCL_DEBUG="INFO", SECRET="1"
    )
    for node_rank, command in enumerate((first, second)):
        assert command[:2] == ["cd", str(ROOT)] and "NCCL_DEBUG=INFO" in command and "SECRET=1" not in command
        place = parse_args(command[command.index("torch.distributed.run") + 1 :])
        assert (place.nnodes, place.node_rank, place.nproc_per_node) == ("2", node_rank, "2")
        assert (place.master_addr, place.master_port, place.training_script) == ("nodea", 6000, "pretrain_zeropp_gpt.py")
        assert parse_flags(place.training_script_args).data.data_path == ("0.3", "my corpus")


def test_a_module_is_started_by_its_name(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path)
    for command in shown(fakes, [*words, "--dry-run", "--module", "pretrain_zeropp_gpt", "--zero-stage", "3"]):
        place = parse_args(command[command.index("torch.distributed.run") + 1 :])
        assert (place.module, place.training_script, place.training_script_args) == (True, "pretrain_zeropp_gpt", ["--zero-stage", "3"])


def test_slots_that_are_not_the_first_are_named_to_the_host(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path, "nodea slots=4\nnodeb slots=4\n")
    commands = shown(fakes, [*words, "--dry-run", "-e", "nodea:0,1@nodeb:2,3", "pretrain_zeropp_gpt.py"])
    assert "CUDA_VISIBLE_DEVICES=2,3" in commands[0] and not any("CUDA_VISIBLE" in word for word in commands[1])


def test_variables_come_from_prefixes_and_files(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path)
    (fakes.folder / ".deepspeed_env").write_text("# site\nNCCL_IB_HCA=mlx5_0,mlx5_1\nGREETING=good morning\n")
    more = {"NCCL_IB_HCA": "old", "MY_OWN": "1", "CUDA_VISIBLE_DEVICES": "3"}
    (command, _) = shown(fakes, [*words, "--dry-run", "--env-prefix", "MY_", "pretrain_zeropp_gpt.py"], **more)
    assert {"NCCL_IB_HCA=mlx5_0,mlx5_1", "GREETING=good morning", "MY_OWN=1"} <= set(command)
    assert not any("CUDA_VISIBLE" in word for word in command)
    (command, _) = shown(fakes, [*words, "--dry-run", "pretrain_zeropp_gpt.py"], MEGATRON_ZPP_REFERENCE_OPS="1")
    assert "MEGATRON_ZPP_REFERENCE_OPS=1" in command  # a message of the run tells users to set it on every rank
    (tmp_path / "other_env").write_text("A=1\nB\n")
    done = fakes.run(*words, "--env-file", tmp_path / "other_env", "pretrain_zeropp_gpt.py")
    assert done.returncode == 2 and "other_env, line 2: 'B' is not a variable; write it as NAME=value" in done.stderr


def test_the_file_of_this_folder_wins_over_that_at_home(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path)
    words[1] = str(ROOT / words[1])
    (fakes.folder / ".deepspeed_env").write_text("A=home\nB=home\n")
    (tmp_path / ".deepspeed_env").write_text("A=here\n")
    done = fakes.run(*words, "--dry-run", "pretrain_zeropp_gpt.py", folder=tmp_path, HOME=str(fakes.folder))
    assert done.stdout.count("A=here B=home") == 2, done.stderr


def test_all_hosts_of_a_start_have_one_job_id_which_no_other_start_has(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path)

    def ids(*options: str, **variables: str) -> list[str]:
        commands = shown(fakes, [*words, "--dry-run", *options, "pretrain_zeropp_gpt.py"], **variables)
        return [word for command in commands for word in command if word.startswith(f"{JOB_VARIABLE}=")]

    first, second = ids(), ids()
    assert len(first) == len(second) == 2 and len({*first}) == len({*second}) == 1 and first != second
    assert ids(**{JOB_VARIABLE: "of mine"}) == [f"{JOB_VARIABLE}=of mine"] * 2
    assert ids("--no_ssh", "--node_rank", "0") == []
    assert ids("--no_ssh", "--node_rank", "0", **{JOB_VARIABLE: "of mine"}) == [f"{JOB_VARIABLE}=of mine"]


def test_values_reach_every_host_as_they_are_and_stand_in_no_command(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path, "nodea slots=1\nlocalhost slots=1\n")
    values = {"WANDB_API_KEY": "k-12345", "MLFLOW_ODD": "two\nlines, 'quotes' \"$HOME\" `date` \\n é"}
    for host in ("nodea", "here"):
        (tmp_path / f"{host}.py").write_text("")
    options = ["--env-prefix", "WANDB_", "--master_addr", "nodea", "--python", str(fakes.folder / "torchrun_of_host")]
    done = fakes.run(*words, *options, "pretrain_zeropp_gpt.py", FAKE_HOST="here", **values)
    assert (done.returncode, done.stderr) == (0, "")
    hosts = fakes.calls("torchrun_of_host")
    assert sorted(host.environment["FAKE_HOST"] for host in hosts) == ["here", "nodea"]
    assert all(host.environment.items() >= values.items() for host in hosts)
    program = Program("python", "s", [], tmp_path, values)
    for command in host_commands([Host("nodea", (0,), 1), Host("localhost", (0,), 1)], program, Rendezvous("nodea", 6000), None):
        assert not any(value in word for value in ("k-12345", "two") for word in command.words)


def test_secrets_are_named_and_not_shown(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path)
    secrets = {"WANDB_API_KEY": "k-1", "HF_TOKEN": "k-2", "MLFLOW_TRACKING_PASSWORD": "k-3", "MLFLOW_TRACKING_URI": "https://me:k-4@site"}
    others = {"TOKENIZERS_PARALLELISM": "true", "NCCL_IB_PKEY": "0x7fff"}
    prefixes = ["--env-prefix", "WANDB_", "--env-prefix", "HF_", "--env-prefix", "TOKEN"]
    for command in shown(fakes, [*words, "--dry-run", *prefixes, "pretrain_zeropp_gpt.py"], **secrets, **others):
        assert {f"{name}=***" for name in secrets} | {f"{name}={value}" for name, value in others.items()} <= set(command)
        assert not any("k-" in word for word in command)


def test_variables_that_do_not_arrive_whole_start_nothing(tmp_path: Path) -> None:
    program = Program("touch", "s", [], tmp_path, {"A": "1"})
    (command,) = host_commands([Host("localhost", (0,), 1)], program, Rendezvous("localhost", 6000), None)
    done = subprocess.run(command.words, input=command.first_input[:-5], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "did not get all variables over standard input" in done.stderr


def test_without_a_hostfile_there_is_a_rank_per_gpu_of_this_machine(tmp_path: Path) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("nvidia-smi", 'print("GPU 0: A\\nGPU 1: A")')
    words = [sys.executable, "tools/launch.py", "--dry-run", "pretrain_zeropp_gpt.py"]
    (command,) = shown(fakes, words)
    place = parse_args(command[command.index("torch.distributed.run") + 1 :])
    assert (place.nnodes, place.nproc_per_node, place.master_addr) == ("1", "2", "127.0.0.1")


@pytest.mark.parametrize(
    ("visible", "shown_gpus"),
    [
        (None, "0 1 2 3"),
        ("2,3", "2 3"),
        (" 3 , 0 ", "3 0"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("1,-1,2", "1"),
        ("0,4,1", "0"),
        ("1,1", ""),
        ("GPU-8932f937-d72c,GPU-1a2b", "GPU-8932f937-d72c GPU-1a2b"),
        ("MIG-GPU-8932f937/1/0", "MIG-GPU-8932f937/1/0"),
    ],
)
def test_the_gpus_of_this_machine_are_those_that_cuda_shows(visible: str | None, shown_gpus: str) -> None:
    assert list(visible_gpus(visible, 4)) == shown_gpus.split()
    assert visible_gpus("GPU-8932f937", 0) == visible_gpus("0", 0) == visible_gpus(None, 0) == ()


def test_without_a_hostfile_there_is_a_rank_per_visible_gpu_and_slots_are_chosen_among_them(tmp_path: Path) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("nvidia-smi", 'print("GPU 0: A\\nGPU 1: A\\nGPU 2: A\\nGPU 3: A")')
    words = [sys.executable, "tools/launch.py", "--dry-run"]
    (command,) = shown(fakes, [*words, "s"], CUDA_VISIBLE_DEVICES="2,3")
    assert command[command.index("--nproc_per_node") + 1] == "2" and not any("CUDA_VISIBLE" in word for word in command)
    (command,) = shown(fakes, [*words, "--exclude", "localhost:0", "s"], CUDA_VISIBLE_DEVICES="2,3")
    assert command[command.index("--nproc_per_node") + 1] == "1" and "CUDA_VISIBLE_DEVICES=3" in command
    done = fakes.run(*words, "s", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "CUDA_VISIBLE_DEVICES leaves no GPU of this machine; give --num_gpus" in done.stderr


def test_without_ssh_each_host_starts_its_own_ranks(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path)
    (command,) = shown(fakes, [*words, "--dry-run", "--no_ssh", "--node_rank", "1", "pretrain_zeropp_gpt.py"])
    assert command[0] == "cd" and command[command.index("--node_rank") + 1] == "1" and "nodea" in command


@pytest.mark.parametrize(
    "words, named",
    [
        ("--num_nodes 3 s", "--num_nodes 3 is more than the 2 hosts"),
        ("--num_gpus 3 s", "--num_gpus 3 is more than the 2 slots of nodea"),
        ("--num_gpus 0 s", "0 is not a whole number from 1 to 4096"),
        ("--num_gpus \u00b2 s", "\u00b2 is not a whole number from 1 to 4096"),
        ("--master_port 70000 s", "70000 is not a whole number from 1 to 65535"),
        ("--no_ssh --node_rank -1 s", "-1 is not a whole number from 0"),
        ("--include nodea --num_gpus 1 s", "cannot be combined with --include and --exclude"),
        ("--include nodea:0@nodeb s", "hosts must have equal numbers of slots, nodea has 1, nodeb has 2"),
        ("--include nodex s", "'nodex' is not among the hosts"),
        ("--no_ssh s", "say which one with --node_rank, 0 to 1"),
        ("--node_rank 1 s", "--node_rank needs --no_ssh; give --no_ssh as well."),
        ("--hostfil x s", "--hostfil"),
        ("", "script"),
    ],
)
def test_mistakes_are_named_before_anything_is_started(tmp_path: Path, words: str, named: str) -> None:
    fakes, command = launcher(tmp_path)
    done = fakes.run(*command, *words.split())
    assert done.returncode == 2 and named in done.stderr.splitlines()[-1] and not fakes.calls("ssh")


def test_without_ssh_on_the_path_another_machine_cannot_be_reached(tmp_path: Path) -> None:
    fakes, command = launcher(tmp_path)
    done = fakes.run(*command, "s", PATH=str(tmp_path))
    assert done.returncode == 2 and "ssh is not found, and nodea is another machine" in done.stderr.splitlines()[-1]


def test_a_hostfile_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    done = FakeCommands(tmp_path).run(sys.executable, "tools/launch.py", "--hostfile", "nowhere", "s")
    assert done.returncode == 2 and "nowhere" in done.stderr


def start(tmp_path: Path, **programs: str) -> subprocess.Popen[str]:
    """Starts the launcher on hosts that run these programs."""
    fakes, words = launcher(tmp_path)
    for host, program in programs.items():
        (tmp_path / f"{host}.py").write_text(program)
    environment = {**os.environ, "PATH": f"{fakes.folder}:{os.environ['PATH']}"}
    command = [*words, "--python", str(fakes.folder / "torchrun_of_host"), "pretrain_zeropp_gpt.py"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def waiting(tmp_path: Path, host: str, code: int) -> str:
    return WAITS.format(code=code, ready=str(tmp_path / f"{host}.ready"))


def wait_until_ready(tmp_path: Path, *hosts: str) -> None:
    wait_until(lambda: all((tmp_path / f"{host}.ready").exists() for host in hosts), f"{' and '.join(hosts)} do not start")


def test_all_hosts_that_succeed_make_a_success(tmp_path: Path) -> None:
    process = start(tmp_path, nodea="pass", nodeb="print('from b')")
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, output, errors) == (0, "from b\n", "")


def test_the_first_host_that_fails_ends_the_others_and_gives_its_exit_code(tmp_path: Path) -> None:
    fails = f"import time\nwhile not os.path.exists({str(tmp_path / 'nodea.ready')!r}): time.sleep(0.02)\nsys.exit(5)"
    process = start(tmp_path, nodea=waiting(tmp_path, "nodea", 9), nodeb=fails)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 5
    assert "launch.py: nodeb: exit code 5; ending nodea" in errors and "nodea: exit code" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_host_and_ranks_that_leave_in_peace_make_a_success(tmp_path: Path, number: int) -> None:
    programs = {host: waiting(tmp_path, host, 0).replace("SIGTERM", "SIGINT") + "" for host in ("nodea", "nodeb")}
    if number != signal.SIGINT:
        programs = {host: waiting(tmp_path, host, 0) for host in programs}
    process = start(tmp_path, **programs)
    wait_until_ready(tmp_path, "nodea", "nodeb")
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (0, "")


def test_a_launcher_that_is_killed_takes_every_host_with_it(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    program = f"import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(open({str(ended)!r}, 'w').close()))\n"
    program += f"open({str(tmp_path / 'nodea.ready')!r}, 'w')\n{SLEEP}"
    process = start(tmp_path, nodea=program, nodeb="pass")
    wait_until_ready(tmp_path, "nodea")
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)
    wait_until(ended.exists, "the program on nodea has not ended")


def test_a_real_run_on_two_hosts_trains_as_one_world(tmp_path: Path) -> None:
    fakes, words = launcher(tmp_path, "nodea slots=1\nnodeb slots=1\n")
    flags = [*TINY, *"--train-iters 3 --zero-stage 3 --zero-quantized-weights".split(), "--log-jsonl", str(tmp_path / "log.jsonl")]
    rendezvous = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    done = fakes.run(*words, *rendezvous, "pretrain_zeropp_gpt.py", *flags, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert {call.words[-2] for call in fakes.calls("ssh")} == {"nodea", "nodeb"}  # they start at once, in any order
    assert "tensor-model-parallel size: 1 (2 nodes x 1 rank)" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records if "lm_loss" in record] == [1, 2, 3]
    assert all(record["inter_node_bytes"] > 0 for record in records if "lm_loss" in record)
