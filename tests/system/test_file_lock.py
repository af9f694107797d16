from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from megatron_zpp.system.file_lock import NO_LOCKS_HERE, try_lock


def test_a_lock_has_one_holder_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as one:
        assert try_lock(one)
        with path.open("ab") as other:
            assert not try_lock(other)
    with path.open("ab") as later:
        assert try_lock(later)


@pytest.mark.parametrize("number", [*NO_LOCKS_HERE, errno.EIO])
def test_where_there_are_no_locks_nobody_is_waited_for_and_other_errors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "lock").open("ab") as file:
        if number in NO_LOCKS_HERE:
            assert try_lock(file)
        else:
            with pytest.raises(OSError, match="no"):
                try_lock(file)
