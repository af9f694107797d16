"""What the preprocessing says while it works."""

import sys
import time

from tqdm import tqdm


class ProgressBar:
    """A bar with ETA on a terminal, else a line per log_interval documents; both with documents and megabytes of text per second.

    total_bytes: of the input files, None where that is unknown; start_bytes: of them read by an earlier run.
    """

    def __init__(self, total_bytes: int | None, start_bytes: int, log_interval: int) -> None:
        self.total_bytes = total_bytes
        self.log_interval = log_interval
        self.bar = tqdm(total=total_bytes, initial=start_bytes, unit="B", unit_scale=True, disable=None)
        self.started = time.monotonic()
        self.start_bytes = start_bytes
        self.line_count = 0
        self.text_bytes = 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def advance(self, line_count: int, text_bytes: int, file_bytes: int) -> None:
        """line_count, text_bytes: what came now; file_bytes: what has been read of all files."""
        is_due = (self.line_count + line_count) // self.log_interval > self.line_count // self.log_interval
        self.line_count += line_count
        self.text_bytes += text_bytes
        seconds = max(time.monotonic() - self.started, 1e-9)
        rates = f"{self.line_count / seconds:.0f} docs/s, {self.text_bytes / seconds / 1e6:.2f} MB/s"
        self.bar.set_postfix_str(rates, refresh=False)
        self.bar.update(file_bytes - self.bar.n)
        if self.bar.disable and is_due:
            # In one write, which an interruption does not cut before its line end.
            sys.stderr.write(f"Processed {self.line_count} documents ({rates}{self._rest(file_bytes, seconds)}).\n")
            sys.stderr.flush()

    def _rest(self, file_bytes: int, seconds: float) -> str:
        if self.total_bytes is None or file_bytes <= self.start_bytes:
            return ""
        share = file_bytes / self.total_bytes if self.total_bytes else 1.0
        left_seconds = (self.total_bytes - file_bytes) * seconds / (file_bytes - self.start_bytes)
        return f", {share:.0%}, {left_seconds:.0f} s left"
