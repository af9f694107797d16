"""The kernels, built once for all tests of this folder and kept in the user's cache."""

from __future__ import annotations

import pytest

from megatron_zpp.ops import extension
from megatron_zpp.ops.build import Build


@pytest.fixture(scope="session")
def kernels() -> None:
    """The kernels are loaded: ops on CPU tensors run on them."""
    Build().make()
    assert extension.load()


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops run on the reference, whatever has been loaded."""
    monkeypatch.setattr(extension, "_loaded", None)
