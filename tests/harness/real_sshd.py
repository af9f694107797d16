"""A real sshd on a free port of this machine, and an ssh that finds it under every host's name."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.patience import wait_until
from harness.rank_pool import free_port

REAL_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


class NoSshd(Exception):
    """Why this machine can run no sshd."""


@contextmanager
def real_sshd(folder: Path, hosts: tuple[str, ...]) -> Iterator[Path]:
    """A folder for PATH, whose ssh connects to this sshd under the names of `hosts`. Raises NoSshd where there can be none."""
    programs = {name: shutil.which(name, path=REAL_PATH) for name in ("sshd", "ssh", "ssh-keygen")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        raise NoSshd(f"{' and '.join(missing)} not installed (the packages openssh-server and openssh-client)")
    if os.geteuid() == 0 and not Path("/run/sshd").is_dir():
        raise NoSshd("sshd of root needs the folder /run/sshd, which is not there")
    for key in ("host_key", "user_key"):
        subprocess.run([programs["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    port = free_port()
    _write_settings(folder, hosts, port)
    with open(folder / "sshd.log", "w") as log:
        server = subprocess.Popen([str(programs["sshd"]), "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    try:
        _wait_for(server, port, folder / "sshd.log")
        (folder / "path").mkdir()
        ssh = folder / "path" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {programs["ssh"]} -F {folder / "ssh_config"} "$@"\n')
        ssh.chmod(0o755)
        yield ssh.parent
    finally:
        server.terminate()
        server.wait()


def _write_settings(folder: Path, hosts: tuple[str, ...], port: int) -> None:
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder / 'host_key'}\nAuthorizedKeysFile {folder / 'authorized_keys'}\n"
        f"PidFile {folder / 'sshd.pid'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host_key.pub').read_text()}")
    (folder / "ssh_config").write_text(
        f"Host {' '.join(hosts)}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {folder / 'user_key'}\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known_hosts'}\n  StrictHostKeyChecking yes\n"
    )


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(lambda: server.poll() is not None or answers(), "sshd does not answer")
    if server.poll() is not None:
        raise NoSshd(f"sshd did not start: {log.read_text().strip()}")
