"""Runs the scripts for torchrun on one and on several machines, with fakes of torchrun and nvidia-smi that record their calls."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from harness.fake_commands import ROOT, Call, FakeCommands
from harness.rank_pool import free_port
from torch.distributed.run import parse_args

from megatron_zpp.config.cli import parse_flags

FLAGS = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --zero-stage 3".split()
THREE_GPUS = 'print("GPU 0: A\\nGPU 1: A\\nGPU 2: A")'


def flags_of(call: Call) -> list[str]:
    return call.words[call.words.index("pretrain_zeropp_gpt.py") + 1 :]


def test_on_one_machine_there_is_a_rank_per_gpu(tmp_path: Path) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("torchrun")
    fakes.add("nvidia-smi", THREE_GPUS)
    done = fakes.run("bash", ROOT / "scripts" / "torchrun_one_node.sh", *FLAGS, folder=tmp_path, NCCL_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    (call,) = fakes.calls("torchrun")
    place = parse_args(call.words)
    assert (place.standalone, place.nproc_per_node) == (True, "3")
    assert call.folder == str(ROOT) and flags_of(call) == FLAGS and parse_flags(FLAGS).zero.zero_stage == 3
    assert call.environment["OMP_NUM_THREADS"] == "1" and call.environment["NCCL_DEBUG"] == "INFO"  # the user's value stays


def test_without_gpus_the_number_of_ranks_has_to_be_said(tmp_path: Path) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("torchrun")
    fakes.add("nvidia-smi", "sys.exit(9)")
    nodes = {"NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name in ("torchrun_one_node.sh", "torchrun_nodes.sh"):
        done = fakes.run("bash", f"scripts/{name}", *FLAGS, **nodes)
        assert done.returncode == 2 and "nvidia-smi shows no GPU; set RANKS" in done.stderr
        assert fakes.run("bash", f"scripts/{name}", *FLAGS, **nodes, RANKS="2").returncode == 0
    assert [parse_args(call.words).nproc_per_node for call in fakes.calls("torchrun")] == ["2", "2"]


def test_exit_codes_of_torchrun_are_those_of_the_scripts(tmp_path: Path) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("torchrun", "sys.exit(7)")
    nodes = {"NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANKS": "1"}
    for name in ("torchrun_one_node.sh", "torchrun_nodes.sh"):
        assert fakes.run("bash", f"scripts/{name}", **nodes).returncode == 7


def test_on_several_machines_each_is_told_its_place(tmp_path: Path) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("torchrun")
    fakes.add("nvidia-smi", THREE_GPUS)
    port = free_port()
    for place in ({"NODE_RANK": "0", "MASTER_PORT": str(port)}, {"NODE_RANK": "1"}):
        variables = {"NODES": "2", "MASTER_ADDR": "127.0.0.1"} | place
        assert fakes.run("bash", "scripts/torchrun_nodes.sh", *FLAGS, **variables).returncode == 0
    calls = fakes.calls("torchrun")
    places = [parse_args(call.words) for call in calls]
    assert [(place.nnodes, place.node_rank, place.nproc_per_node, place.master_addr, place.master_port) for place in places] == [
        ("2", 0, "gpu", "127.0.0.1", port),
        ("2", 1, "gpu", "127.0.0.1", 29500),  # by default
    ]
    assert all(flags_of(call) == FLAGS for call in calls)


@pytest.mark.parametrize("missing", ["NODES", "NODE_RANK", "MASTER_ADDR"])
def test_a_variable_that_is_not_set_is_named(tmp_path: Path, missing: str) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("torchrun")
    variables = {name: value for name, value in {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items() if name != missing}
    done = fakes.run("bash", "scripts/torchrun_nodes.sh", *FLAGS, **variables)
    assert done.returncode != 0 and f"{missing} is not set; set it to" in done.stderr and not fakes.calls("torchrun")


@pytest.mark.parametrize(
    "variable, value, sentence",
    [
        ("NODES", "two", "NODES=two is not a whole number"),
        ("NODE_RANK", "2", "NODE_RANK=2 is not a whole number from 0 to 1"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 is not a whole number from 1 to 65535"),
        ("MASTER_ADDR", "--help", "MASTER_ADDR --help begins with a dash"),
        ("MASTER_ADDR", "no host", "MASTER_ADDR=no host cannot be resolved on"),
    ],
)
def test_a_variable_out_of_range_is_refused(tmp_path: Path, variable: str, value: str, sentence: str) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("torchrun")
    variables = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"} | {variable: value}
    done = fakes.run("bash", "scripts/torchrun_nodes.sh", *FLAGS, **variables)
    assert done.returncode == 2 and sentence in done.stderr and not fakes.calls("torchrun")


@pytest.mark.parametrize(("rank", "is_refused"), [("0", True), ("1", False)])
def test_a_port_of_another_program_is_refused_on_the_first_node(tmp_path: Path, rank: str, is_refused: bool) -> None:
    fakes = FakeCommands(tmp_path)
    fakes.add("torchrun")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        variables = {"NODES": "2", "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANKS": "1"}
        done = fakes.run("bash", "scripts/torchrun_nodes.sh", *FLAGS, **variables)
    assert (f"MASTER_PORT={port} is the port of another program on " in done.stderr) == is_refused
    assert (done.returncode, len(fakes.calls("torchrun"))) == ((2, 0) if is_refused else (0, 1))
