"""A run that is followed while it trains."""

from pathlib import Path

from megatron_zpp.system.outside import OutsideFile
from run_logs.followed_file import FollowedFile
from run_logs.history import REMEDY, RunHistory

SILENT_INTERVALS = 5
SHORTEST_SILENCE_SECONDS = 60.0


class FollowedRun:
    """The history of a run as far as its log has been read.

    unusable_lines: how many lines of the log are no objects of a log.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.history = RunHistory(name)
        self.unusable_lines = 0
        self._file = FollowedFile(path)
        self._outside = OutsideFile(path, str(path), REMEDY)

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def is_there(self) -> bool:
        return self._file.modified_at is not None

    def read_on(self) -> bool:
        """Reads what the log has gained, and returns whether that was anything."""
        gained = False
        for line in self._file.new_lines():
            gained = True
            if line is None:
                self.history, self.unusable_lines = RunHistory(self.name), 0
                continue
            try:
                self.history.add(self._outside.members(line, has_any_numbers=True))
            except ValueError:
                self.unusable_lines += 1
        return gained

    @property
    def is_finished(self) -> bool:
        """Whether the last iteration and the evaluations after it are logged; False if the log does not say which iteration is the last."""
        history, last = self.history, self.history.latest("train_iters")
        if last is None or max([history.iterations[-1], *history.evaluated]) < last:
            return False
        return sum(iteration >= last for iteration in history.evaluated) >= (history.latest("final_evaluations") or 0)

    def silent_seconds(self, now: float) -> float:
        """How long the log has not grown, if that is suspiciously long; else 0. now: seconds since the epoch.

        That is more than SILENT_INTERVALS times the time between its lines, and more than a minute.
        """
        history = self.history
        if self.is_finished or self._file.modified_at is None or not history.iterations:
            return 0.0
        interval = (history.latest("interval_iterations") or 1) * (history.latest("elapsed_ms_per_iteration") or 0.0) / 1000
        silence = now - self._file.modified_at
        return silence if silence > max(SHORTEST_SILENCE_SECONDS, SILENT_INTERVALS * interval) else 0.0
