"""Builds the kernels once for all tests of this folder, in the user's cache."""

from __future__ import annotations

import pytest

from megatron_zpp.ops import extension
from megatron_zpp.ops.build import Build


@pytest.fixture(scope="session")
def kernels() -> None:
    """Loads the kernels, so that ops on CPU tensors run on them."""
    Build().make()
    assert extension.load()


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ops run on the reference, even if kernels are loaded."""
    monkeypatch.setattr(extension, "_loaded", None)
    monkeypatch.setattr(extension, "_refusal", "")
    monkeypatch.setattr(extension, "_no_code", "")
