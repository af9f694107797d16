"""What each host is to run: one torchrun in bash, on this machine or through ssh, told variables and signals over its standard input."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hostfile import Host

# Variables whose names begin so go to every host. CUDA_VISIBLE_DEVICES does not: it is a matter of slots.
EXPORTED_PREFIXES = ("NCCL_", "GLOO_", "TORCH", "PYTORCH_", "PYTHON", "CUDA_", "OMP_", "MKL_", "UCX_", "MV2_", "MLFLOW_", "TRITON_")
NOT_EXPORTED = ("CUDA_VISIBLE_DEVICES",)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# A dead host is noticed after three unanswered messages. BatchMode: a password cannot be asked for, so that is an error at once.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=30")
# Names whose values --dry-run does not show; neither are those of addresses with a password in them. A PKEY of InfiniBand is a number.
SECRET_NAME = re.compile(r"((?<!IB_P)KEY|TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|PWD|CREDENTIAL|AUTH)S?(_|$)", re.IGNORECASE)
SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")
# Standard input begins with the variables, for what stands among a program's words can be read by everyone on its machine. They end
# with a line that is no assignment; bash reads a pipe byte by byte, so nothing behind that line is lost.
END_OF_VARIABLES = "end of variables"
# torchrun runs in a process group of its own (set -m), so that signals do as for any program in the foreground. Further lines of
# standard input are names of signals for it, and its end is the end of the launcher.
WRAPPER = """cd {folder} || exit 1
while IFS= read -r -t 60 line && [ "$line" != "{end}" ]; do eval "export $line"; done
if [ "$line" != "{end}" ]; then
    echo "launch.py: $HOSTNAME was not told all variables over standard input; does a start-up file of its shell read it?" >&2
    exit 1
fi
set -m
exec 3<&0
{torchrun} </dev/null 3<&- &
torchrun=$!
{{ while read -r name; do kill -s "$name" "$torchrun"; done; kill -s TERM "$torchrun"; }} <&3 2>/dev/null &
listener=$!
disown "$listener"
set +m
exec 3<&-
wait "$torchrun"
code=$?
kill -s KILL -- "-$listener" 2>/dev/null
exit "$code"
"""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of all hosts find each other."""

    address: str
    port: int


@dataclass(frozen=True)
class Program:
    """What torchrun starts, and where. variables: set on every host."""

    python: str
    script: str
    flags: Sequence[str]
    folder: Path
    variables: Mapping[str, str]


@dataclass(frozen=True)
class HostCommand:
    """The words that start one host's ranks from this machine, and what they read first.

    shown: the same for a reader, without what passes signals on, and without secrets.
    """

    host: str
    words: tuple[str, ...]
    first_input: str
    shown: str


def host_commands(hosts: Sequence[Host], program: Program, meeting: Meeting, ssh_port: int | None) -> list[HostCommand]:
    """One command per host, in the order of node ranks."""
    ssh = (*SSH, *(() if ssh_port is None else ("-p", str(ssh_port))))
    return [
        _host_command(host, program, _torchrun(program, meeting, len(hosts), rank, len(host.slots)), ssh) for rank, host in enumerate(hosts)
    ]


def _host_command(host: Host, program: Program, torchrun: Sequence[str], ssh: Sequence[str]) -> HostCommand:
    variables = dict(program.variables)
    if not host.has_first_slots:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.slots))
    folder = shlex.quote(os.fspath(program.folder))
    here = ("bash", "-c", WRAPPER.format(folder=folder, end=END_OF_VARIABLES, torchrun=shlex.join(torchrun)))
    first_input = "".join(f"{line}\n" for line in [*(_assignment(*variable) for variable in variables.items()), END_OF_VARIABLES])
    shown = " ".join([f"cd {folder} &&", *(_assignment(name, _shown(name, variables[name])) for name in variables), shlex.join(torchrun)])
    if is_this_machine(host.name):
        return HostCommand(host.name, here, first_input, shown)
    # --: whatever a host is called, it is no option.
    there = (*ssh, "--", host.name)
    return HostCommand(host.name, (*there, shlex.join(here)), first_input, shlex.join((*there, shown)))


def _assignment(name: str, value: str) -> str:
    """NAME=value for bash, in one line."""
    return f"{name}={shlex.quote(value)}".replace("\n", "'$'\\n''")


def _shown(name: str, value: str) -> str:
    return "***" if SECRET_NAME.search(name) or SECRET_VALUE.search(value) else value


def is_this_machine(name: str) -> bool:
    """Whether the name is one that this machine has for itself."""
    return name in LOCAL_NAMES or name.split(".")[0] == socket.gethostname().split(".")[0]


def exported_variables(environment: Mapping[str, str], more_prefixes: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """The variables that go to every host: by the beginning of their names, and what the files say, which wins."""
    prefixes = (*EXPORTED_PREFIXES, *more_prefixes)
    variables = {name: value for name, value in environment.items() if name.startswith(prefixes) and name not in NOT_EXPORTED}
    for file in files:
        variables |= read_variables(file)
    return dict(sorted(variables.items()))


def read_variables(file: Path) -> dict[str, str]:
    """The variables of a file of NAME=VALUE lines; blank lines and lines with # say nothing. Raises ValueError naming file and line."""
    variables = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise ValueError(f"{file}, line {number}: {text!r} is no variable; write it as NAME=value.")
        variables[name] = value
    return variables


def _torchrun(program: Program, meeting: Meeting, nodes: int, node_rank: int, ranks: int) -> list[str]:
    where = ["--nnodes", str(nodes), "--node_rank", str(node_rank), "--nproc_per_node", str(ranks)]
    where += ["--master_addr", meeting.address, "--master_port", str(meeting.port)]
    return [program.python, "-u", "-m", "torch.distributed.run", *where, program.script, *program.flags]
