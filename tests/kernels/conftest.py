"""The kernels under test, compiled once for all test processes of a run."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from mlakern.build import runner
from mlakern.config import KernelConfig
from mlakern.matrix import BuildItem
from mlakern.store import Entry, open_store

Find = Callable[[KernelConfig], Entry]


@pytest.fixture(scope="session")
def find_kernel(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Find:
    """The entry of a configuration, built when it is first asked for.

    Test processes share one store and take turns to build; the loser of a race finds it present.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "kernels"
    root.mkdir(exist_ok=True)
    found: dict[KernelConfig, Entry] = {}

    def find(config: KernelConfig) -> Entry:
        if config not in found:
            found[config] = _built(root, config)
        return found[config]

    return find


def _built(root: Path, config: KernelConfig) -> Entry:
    with (root / f".{config.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (outcome,) = runner.build([BuildItem(config)], root, jobs=1)
    assert outcome.status != "failed", f"{outcome.error}\n{outcome.log}"
    return open_store(root).find(config)
