"""Interrupts of programs under test."""

import signal


def heed_interrupts() -> None:
    """For preexec_fn: a shell without job control starts background jobs, and so all that they start, with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
