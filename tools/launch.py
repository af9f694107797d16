"""Starts a run on the hosts of a file: one torchrun per host, over ssh, with the hostfile of the `deepspeed` launcher.

    python tools/launch.py --hostfile hosts pretrain_zeropp_gpt.py ...

A line of the file is `name slots=8`. Without a file it starts one rank per GPU of this machine. Every host must have this folder and
this Python at the same path, and must allow ssh without a password. Neither pdsh nor deepspeed is needed. Signals are forwarded to the
ranks of all hosts. The first host that fails ends the others, and its exit code is that of the launcher.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cli.command import count_from_0, errors_in_words, number_within, parsed, rank_count
from launching.host_commands import LOCAL_NAMES, HostCommand, Program, Rendezvous, exported_variables, host_commands, is_this_machine
from launching.host_processes import HostProcesses
from launching.hostfile import LARGEST_SLOTS, Host, check_same_slots, exclude, include, read_hostfile

from megatron_zpp.config.counted import counted
from megatron_zpp.parallel.job_ids import JOB_VARIABLE
from megatron_zpp.system.user_error import UserError

DEFAULT_HOSTFILE = Path("/job/hostfile")
VARIABLE_FILES = (Path.home() / ".deepspeed_env", Path(".deepspeed_env"))  # the later wins
DEFAULT_PORT = 29500
port = number_within(1, 65535)


def main() -> None:
    parser = _parser()
    options = parsed(parser, sys.argv[1:])
    with errors_in_words(parser):
        commands = planned_commands(options)
        if options.dry_run:
            print("\n".join(command.shown for command in commands))
            return
    sys.exit(HostProcesses(commands).wait())


def planned_commands(options: argparse.Namespace) -> list[HostCommand]:
    """The commands that this launcher must start. Raises UserError for hosts, slots or files that do not exist."""
    hosts = chosen_hosts(options)
    check_same_slots(hosts)
    files = [file for file in VARIABLE_FILES if file.is_file()] if options.env_file is None else [options.env_file]
    variables = _job_id(options) | exported_variables(os.environ, options.env_prefix, files)
    program = Program(options.python, options.script, options.flags, Path.cwd(), variables, is_module=options.module)
    rendezvous = _rendezvous(hosts, options)
    if options.no_ssh:
        return [_own_command(hosts, program, rendezvous, options.node_rank)]
    if options.node_rank is not None:
        raise UserError("--node_rank needs --no_ssh; give --no_ssh as well.")
    _check_ssh_exists(hosts)
    return host_commands(hosts, program, rendezvous, options.ssh_port)


def _job_id(options: argparse.Namespace) -> dict[str, str]:
    """By which the ranks of this start tell those of another that uses the same host and port; none of hosts started singly."""
    return {} if options.no_ssh else {JOB_VARIABLE: uuid.uuid4().hex}


def chosen_hosts(options: argparse.Namespace) -> list[Host]:
    """The hosts and slots that the flags choose."""
    if (options.include or options.exclude) and (options.num_nodes is not None or options.num_gpus is not None):
        raise UserError("--num_nodes and --num_gpus cannot be combined with --include and --exclude; choose in one of these ways.")
    hosts = _all_hosts(options)
    if options.include:
        hosts = include(hosts, options.include)
    if options.exclude:
        hosts = exclude(hosts, options.exclude)
    if options.num_nodes is not None:
        hosts = _first_hosts(hosts, options.num_nodes)
    if options.num_gpus is not None:
        hosts = [_first_slots(host, options.num_gpus) for host in hosts]
    return hosts


def _all_hosts(options: argparse.Namespace) -> list[Host]:
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    if DEFAULT_HOSTFILE.is_file():
        return read_hostfile(DEFAULT_HOSTFILE)
    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), count_gpus())
    count = options.num_gpus or len(gpus)
    if count == 0:
        hidden = "CUDA_VISIBLE_DEVICES leaves" if "CUDA_VISIBLE_DEVICES" in os.environ and count_gpus() else "nvidia-smi shows"
        raise UserError(f"{hidden} no GPU of this machine; give --num_gpus, the number of ranks, or --hostfile.")
    return [Host("localhost", tuple(range(count)), count, gpus if count <= len(gpus) else ())]


def count_gpus() -> int:
    """GPUs of this machine, as nvidia-smi lists them; 0 without it."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def visible_gpus(visible: str | None, listed: int) -> tuple[str, ...]:
    """The names of the GPUs that CUDA shows, of `listed` ones. visible: CUDA_VISIBLE_DEVICES, None if it is not set.

    A name is a number, or begins with GPU- or MIG-. CUDA ignores the first wrong name and all that follow, and shows nothing if one occurs
    twice.
    """
    names = map(str, range(listed)) if visible is None else (name.strip() for name in visible.split(","))
    found = tuple(itertools.takewhile(lambda name: name in map(str, range(listed)) or (listed > 0 and name[:4] in ("GPU-", "MIG-")), names))
    return found if len(set(found)) == len(found) else ()


def _first_hosts(hosts: list[Host], count: int) -> list[Host]:
    if count > len(hosts):
        raise UserError(f"--num_nodes {count} is more than the {counted(len(hosts), 'host')}; choose at most {len(hosts)}.")
    return hosts[:count]


def _first_slots(host: Host, count: int) -> Host:
    if count > len(host.slots):
        raise UserError(f"--num_gpus {count} is more than the {len(host.slots)} slots of {host.name}; choose at most {len(host.slots)}.")
    return replace(host, slots=host.slots[:count])


def _rendezvous(hosts: Sequence[Host], options: argparse.Namespace) -> Rendezvous:
    first = hosts[0].name
    if options.master_addr is not None:
        return Rendezvous(options.master_addr, options.master_port)
    if len(hosts) == 1 and is_this_machine(first):
        return Rendezvous("127.0.0.1", options.master_port)
    if first in LOCAL_NAMES:
        raise UserError(f"the first host is {first}, which means another machine on each host; give --master_addr.")
    return Rendezvous(first, options.master_port)


def _check_ssh_exists(hosts: Sequence[Host]) -> None:
    others = [host.name for host in hosts if not is_this_machine(host.name)]
    if others and shutil.which("ssh") is None:
        raise UserError(
            f"ssh is not found, and {others[0]} is another machine; install the OpenSSH client, or start each host by --no_ssh --node_rank."
        )


def _own_command(hosts: Sequence[Host], program: Program, rendezvous: Rendezvous, node_rank: int | None) -> HostCommand:
    """The command of one host, for a start on that host itself."""
    if node_rank is None or not 0 <= node_rank < len(hosts):
        raise UserError(f"--no_ssh starts the ranks of one host; say which one with --node_rank, 0 to {len(hosts) - 1}.")
    here = [replace(host, name="localhost") for host in hosts]
    return host_commands(here, program, rendezvous, None)[node_rank]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument("-H", "--hostfile", type=Path, help=f"lines of `name slots=N` (default: {DEFAULT_HOSTFILE} if it exists)")
    hosts.add_argument("-i", "--include", default="", metavar="HOSTS", help="use only these: a@b:0,2 is all of a, and slots 0 and 2 of b")
    hosts.add_argument("-e", "--exclude", default="", metavar="HOSTS", help="use all but these, in the same form")
    hosts.add_argument("--num_nodes", "--num-nodes", type=rank_count, metavar="N", help="use the first N hosts (default: all)")
    hosts.add_argument(
        "--num_gpus",
        "--num-gpus",
        type=number_within(1, LARGEST_SLOTS),
        metavar="N",
        help="use the first N slots of each host; without GPUs, ranks (default: all)",
    )
    rendezvous = parser.add_argument_group("rendezvous")
    rendezvous.add_argument("--master_addr", "--master-addr", metavar="HOST", help="where rank 0 is (default: the first host)")
    rendezvous.add_argument(
        "--master_port", "--master-port", type=port, default=DEFAULT_PORT, metavar="N", help="a free port there (default: %(default)s)"
    )
    start = parser.add_argument_group("start")
    start.add_argument("--dry-run", "--dry_run", action="store_true", help="print the commands and end")
    start.add_argument(
        "--module", action="store_true", help="the script is the name of a module: pretrain_zeropp_gpt of an installed package"
    )
    start.add_argument("--no_ssh", "--no-ssh", action="store_true", help="start only the ranks of this host, whose place --node_rank says")
    start.add_argument("--node_rank", "--node-rank", type=count_from_0, metavar="N", help="place of this host among the hosts, from 0")
    start.add_argument("--ssh_port", "--ssh-port", type=port, metavar="N", help="port of sshd (default: ssh's own)")
    start.add_argument("--python", default=sys.executable, metavar="PATH", help="Python of every host (default: this one)")
    start.add_argument(
        "--env-prefix", action="append", default=[], metavar="PREFIX", help="also export variables that begin with PREFIX; may be repeated"
    )
    start.add_argument(
        "--env-file",
        type=Path,
        metavar="FILE",
        help="lines of NAME=value, as in bash, to export (default: .deepspeed_env at home and here, which wins)",
    )
    parser.add_argument("script", help="what every rank runs: pretrain_zeropp_gpt.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="its flags")
    return parser


if __name__ == "__main__":
    main()
