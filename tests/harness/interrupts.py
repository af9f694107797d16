"""Signals to programs under test."""

import signal

# Of a program that waits for a signal. One that comes just before the program falls asleep is handled when it wakes up.
SLEEP = "for _ in range(12000): time.sleep(0.05)"


def heed_interrupts() -> None:
    """For preexec_fn: a shell without job control starts background jobs, and so all that they start, with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
