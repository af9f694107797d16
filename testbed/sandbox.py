"""Gives this process a network of its own, which the kernel removes when the last process in it has ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

MARK = "SLOW_LINKS_HAS_OWN_NETWORK"
TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")


class CannotIsolate(RuntimeError):
    """Raised if this machine does not allow a separate network; the text names what is missing."""


def enter_own_network(argv: Sequence[str]) -> None:
    """Returns if this process has a network of its own; else replaces this process by `python argv` in such a network.

    Root gets a network namespace, other users get one inside a user namespace. Raises CannotIsolate if neither is possible.
    """
    if os.environ.get(MARK) == str(os.getpid()):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)  # for the names of namespaces; only this process sees it
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    prefix = isolating_command()
    os.environ[MARK] = str(os.getpid())  # exec keeps the process id
    sys.stdout.flush()
    os.execvp(prefix[0], [*prefix, sys.executable, *argv])


def isolating_command() -> list[str]:
    """The words that start a command in a network of its own. Raises CannotIsolate."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise CannotIsolate(f"{', '.join(missing)} not found; install util-linux and iproute2.")
    errors = {}
    for who, words in {"root": [], "an unprivileged user namespace": ["--user", "--map-root-user"]}.items():
        command = ["unshare", *words, "--net", "--mount"]
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return command
        errors[who] = tried.stderr.strip() or f"exit code {tried.returncode}"
    raise CannotIsolate(
        f"a network namespace needs root ({errors['root']}) or an unprivileged user namespace "
        f"({errors['an unprivileged user namespace']}); run as root, or allow user namespaces "
        "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)."
    )
