"""Prints the progress of preprocessing."""

import sys
import time

from tqdm import tqdm


class ProgressBar:
    """Shows a bar on a terminal, else prints a line per log_interval documents. Both show documents and MB of text per second.

    total_bytes: size of all input files, None if it is unknown. start_bytes: how much of them an earlier run has read.
    """

    def __init__(self, total_bytes: int | None, start_bytes: int, log_interval: int) -> None:
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._bar = tqdm(total=total_bytes, initial=start_bytes, unit="B", unit_scale=True, disable=None)
        self._started = time.monotonic()
        self._start_bytes = start_bytes
        self._line_count = 0
        self._text_bytes = 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, line_count: int, text_bytes: int, file_bytes: int) -> None:
        """Adds to the progress. line_count, text_bytes: new since the last call. file_bytes: read from all files so far."""
        is_due = (self._line_count + line_count) // self._log_interval > self._line_count // self._log_interval
        self._line_count += line_count
        self._text_bytes += text_bytes
        seconds = max(time.monotonic() - self._started, 1e-9)
        rates = f"{self._line_count / seconds:.0f} docs/s, {self._text_bytes / seconds / 1e6:.2f} MB/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(file_bytes - self._bar.n)
        if self._bar.disable and is_due:
            # One write, so that an interruption does not cut the line.
            sys.stderr.write(f"Processed {self._line_count} documents ({rates}{self._rest(file_bytes, seconds)}).\n")
            sys.stderr.flush()

    def _rest(self, file_bytes: int, seconds: float) -> str:
        if self._total_bytes is None or file_bytes <= self._start_bytes:
            return ""
        share = file_bytes / self._total_bytes if self._total_bytes else 1.0
        left_seconds = (self._total_bytes - file_bytes) * seconds / (file_bytes - self._start_bytes)
        return f", {share:.0%}, {left_seconds:.0f} s left"
