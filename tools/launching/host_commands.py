"""Builds the command of each host: one torchrun in bash, here or through ssh. Variables and signals come over its standard input."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launching.hostfile import Host
from megatron_zpp.system.outside import OutsideFile
from megatron_zpp.system.user_error import UserError

# Variables with these prefixes are exported to every host. CUDA_VISIBLE_DEVICES is not: it depends on the slots of each host.
EXPORTED_PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH", "PYTORCH_", "PYTHON", "CUDA_", "OMP_", "MKL_", "UCX_", "MV2_", "MLFLOW_", "TRITON_"),
    "MEGATRON_ZPP_",
)
NOT_EXPORTED = ("CUDA_VISIBLE_DEVICES",)
LOCAL_NAMES = ("localhost", "127.0.0.1")
# ssh gives up on a dead host after three unanswered messages. BatchMode: nobody could type a password, so asking for one is an error.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=30")
# --dry-run hides the values of these names, and addresses that contain a password. A PKEY of InfiniBand is a number, not a secret.
SECRET_NAME = re.compile(r"((?<!IB_P)KEY|TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|PWD|CREDENTIAL|AUTH)S?(_|$)", re.IGNORECASE)
SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")
# Variables are sent over standard input, because all users of a machine can read the command line of a program. A line that is not an
# assignment ends them. bash reads a pipe byte by byte, so nothing after that line is lost.
END_OF_VARIABLES = "end of variables"
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # bash evaluates the assignments, so a name must not be a command
# Parts of a value: text in single quotes, in double quotes, outside of quotes; and a comment.
PART = re.compile(r"""'(?P<single>[^']*)'|"(?:[^"\\]|\\.)*"|(?:[^'"\\\s]|\\.|\s+(?=[^\s#]))+""")
COMMENT = re.compile(r"\s+#|\s*$")
EXPANSION = re.compile(r"\\(?P<escaped>[\\$\"'` ])|\$(?P<name>[A-Za-z_]\w*)|\$\{(?P<braced>[A-Za-z_]\w*)\}|\$[({]|`", re.ASCII)
# torchrun runs in its own process group (set -m), so that signals reach it as they reach any program in the foreground. Further lines of
# standard input are names of signals for torchrun. The end of standard input means that the launcher has ended.
WRAPPER = """cd {folder} || exit 1
while IFS= read -r -t 60 line && [ "$line" != "{end}" ]; do eval "export $line"; done
if [ "$line" != "{end}" ]; then
    echo "launch.py: $HOSTNAME did not get all variables over standard input; does a start-up file of its shell read it?" >&2
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
class Rendezvous:
    """Address and port at which the ranks of all hosts connect."""

    address: str
    port: int


@dataclass(frozen=True)
class Program:
    """What torchrun starts, and in which folder. variables: set on every host. is_module: script is the name of a module."""

    python: str
    script: str
    flags: Sequence[str]
    folder: Path
    variables: Mapping[str, str]
    is_module: bool = False


@dataclass(frozen=True)
class HostCommand:
    """The words of the command that starts one host's ranks from this machine, and the text that it reads first.

    shown: the command for a human reader, without secrets and without the part that forwards signals.
    """

    host: str
    words: tuple[str, ...]
    first_input: str
    shown: str


def host_commands(hosts: Sequence[Host], program: Program, rendezvous: Rendezvous, ssh_port: int | None) -> list[HostCommand]:
    """One command per host, in the order of node ranks."""
    ssh = (*SSH, *(() if ssh_port is None else ("-p", str(ssh_port))))
    return [
        _host_command(host, program, _torchrun(program, rendezvous, len(hosts), rank, len(host.slots)), ssh)
        for rank, host in enumerate(hosts)
    ]


def _host_command(host: Host, program: Program, torchrun: Sequence[str], ssh: Sequence[str]) -> HostCommand:
    variables = dict(program.variables)
    if not host.has_first_slots:
        variables["CUDA_VISIBLE_DEVICES"] = host.visible_devices
    folder = shlex.quote(os.fspath(program.folder))
    here = ("bash", "-c", WRAPPER.format(folder=folder, end=END_OF_VARIABLES, torchrun=shlex.join(torchrun)))
    first_input = "".join(f"{line}\n" for line in [*(_assignment(*variable) for variable in variables.items()), END_OF_VARIABLES])
    shown = " ".join([f"cd {folder} &&", *(_assignment(name, _shown(name, variables[name])) for name in variables), shlex.join(torchrun)])
    if is_this_machine(host.name):
        return HostCommand(host.name, here, first_input, shown)
    # --: the name of a host is never taken for an option.
    there = (*ssh, "--", host.name)
    return HostCommand(host.name, (*there, shlex.join(here)), first_input, shlex.join((*there, shown)))


def _assignment(name: str, value: str) -> str:
    """NAME=value for bash, on one line."""
    return f"{name}={shlex.quote(value)}".replace("\n", "'$'\\n''")


def _shown(name: str, value: str) -> str:
    return "***" if SECRET_NAME.search(name) or SECRET_VALUE.search(value) else value


def is_this_machine(name: str) -> bool:
    """Whether the name means this machine."""
    return name in LOCAL_NAMES or name.split(".")[0] == socket.gethostname().split(".")[0]


def exported_variables(environment: Mapping[str, str], more_prefixes: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """The variables for every host: those with an exported prefix, and those in the files. The files override the environment.

    Raises UserError for a name that bash cannot export, and for a file that `read_variables` refuses.
    """
    prefixes = (*EXPORTED_PREFIXES, *more_prefixes)
    variables = {name: value for name, value in environment.items() if name.startswith(prefixes) and name not in NOT_EXPORTED}
    for name in variables:
        if not VARIABLE_NAME.fullmatch(name):
            raise UserError(f"the environment has a variable {name!r}, which bash cannot set on other hosts; unset it.")
    for file in files:
        variables |= read_variables(file, {**environment, **variables})
    return dict(sorted(variables.items()))


def read_variables(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in a file of NAME=VALUE lines, as bash reads them: with quotes, backslashes, $NAME, ~ at the start, and comments.

    environment: gives the values of $NAME that no earlier line gives. An unquoted value may have spaces, as DeepSpeed allows.
    Raises UserError, naming file and line, for any other line.
    """
    variables: dict[str, str] = {}
    found = OutsideFile(file, str(file), "write one variable per line, as NAME=value.")
    for number, line in enumerate(found.text().splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, sign, value = text.removeprefix("export ").lstrip().partition("=")
        if not sign or not VARIABLE_NAME.fullmatch(name):
            raise UserError(f"{file}, line {number}: {text!r} is not a variable; write it as NAME=value.")
        try:
            variables[name] = shell_value(value, {**environment, **variables})
        except ValueError as error:
            raise UserError(f"{file}, line {number}: {name} {error}.") from None
    return variables


def shell_value(text: str, variables: Mapping[str, str]) -> str:
    """The value that bash gives to the text after NAME=. A variable that is not set is empty.

    Raises UserError, without a subject, for a quote without its end and for what only bash can evaluate.
    """
    parts, place = [], 0
    if text.startswith("~"):
        place = len(re.match(r"[^\s/:'\"\\$]*", text)[0])  # type: ignore[index]
        parts.append(os.path.expanduser(text[:place]))
    while place < len(text) and not COMMENT.match(text, place):
        part = PART.match(text, place)
        if part is None:
            raise UserError("has a quote without its end; add it, or put a backslash before the quote")
        parts.append(part["single"] if part["single"] is not None else _expanded(part[0].removeprefix('"').removesuffix('"'), variables))
        place = part.end()
    return "".join(parts)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Text outside of quotes or inside double quotes, with the values of variables."""

    def value(found: re.Match[str]) -> str:
        if found["escaped"] is not None:
            return found["escaped"]
        name = found["name"] or found["braced"]
        if name is None:
            raise UserError(f"has {found[0]}, which only a shell can evaluate; write its value, or put it in single quotes")
        return variables.get(name, "")

    return EXPANSION.sub(value, text)


def _torchrun(program: Program, rendezvous: Rendezvous, nodes: int, node_rank: int, ranks: int) -> list[str]:
    words = ["--nnodes", str(nodes), "--node_rank", str(node_rank), "--nproc_per_node", str(ranks)]
    words += ["--master_addr", rendezvous.address, "--master_port", str(rendezvous.port)]
    words += ["--module"] if program.is_module else []
    return [program.python, "-u", "-m", "torch.distributed.run", *words, program.script, *program.flags]
