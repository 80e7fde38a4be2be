"""Fixtures: no test sees the caller's stores; a compiled kernel; a fake compiler."""

from __future__ import annotations

import pickle
from pathlib import Path

import fake_compiler
import pytest
from hypothesis import settings

from mlakern import store
from mlakern.build.compiler import Compiled, compile_config
from mlakern.config import KernelConfig

# The same examples on each run, and none fails because the machine is busy.
settings.register_profile("mlakern", deadline=None, derandomize=True)
settings.load_profile("mlakern")


@pytest.fixture(autouse=True)
def _no_stores_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.CUBIN_DIR_VARIABLE, raising=False)
    monkeypatch.delenv(store.UNVERIFIED_VARIABLE, raising=False)
    monkeypatch.setenv(store.CACHE_DIR_VARIABLE, str(tmp_path / "user-cache"))
    monkeypatch.setattr(store, "PACKAGED", tmp_path / "packaged")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The default configuration, really compiled, once for each test process."""
    return compile_config(KernelConfig(), tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def fake(compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the fake compiler's module, ready to be used by workers."""
    file = tmp_path / "compiled.pickle"
    file.write_bytes(pickle.dumps(compiled))
    monkeypatch.setenv(fake_compiler.VARIABLE, str(file))
    monkeypatch.delenv("FAKE_BEHAVIOUR", raising=False)
    return fake_compiler.__name__
