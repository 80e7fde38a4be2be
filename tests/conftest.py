"""Fixtures for all tests: no test sees the caller's stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlakern import store


@pytest.fixture(autouse=True)
def _no_stores_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.CUBIN_DIR_VARIABLE, raising=False)
    monkeypatch.delenv(store.UNVERIFIED_VARIABLE, raising=False)
    monkeypatch.setenv(store.CACHE_DIR_VARIABLE, str(tmp_path / "user-cache"))
    monkeypatch.setattr(store, "PACKAGED", tmp_path / "packaged")
