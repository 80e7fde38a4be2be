"""`mlakern run` on a real kernel: the command a newcomer runs first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlakern.cli.app import app
from mlakern.config import KernelConfig
from mlakern.store import Entry

CONFIG = KernelConfig(mask="plain")


@pytest.fixture
def store(find_kernel: Callable[[KernelConfig], Entry]) -> Path:
    return find_kernel(CONFIG).path.parent


def test_the_table_ends_in_pass(store: Path) -> None:
    arguments = ["run", CONFIG.name, "--backend", "emulator", "--store", str(store)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "PASS"
    # Error and bound of the comparison with the model.
    assert re.search(r"\d\.\de-\d\d ≤ 4e-03", done.stdout)


def test_json_carries_errors_below_their_bounds(store: Path) -> None:
    done = CliRunner().invoke(
        app,
        [
            *("run", "--mask", "plain", "--backend", "emulator", "--store", str(store), "--json"),
            *("--heads", "5", "--seq-len-q", "2", "--seq-lens", "0,257", "--splits", "2"),
        ],
    )
    document = json.loads(done.stdout)
    assert (done.exit_code, document["status"], document["backend"]) == (0, "pass", "emulator")
    assert document["name"] == CONFIG.name
    for name, error in document["errors"].items():
        assert 0 <= error <= document["bounds"][name]
    # A real computation, not a copy of the reference.
    assert document["errors"]["kernel_vs_exact_out_bf16"] > 1e-3
