"""What importing the package costs and what it must leave alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# Modules that a serving process must never get from us, at import or later.
FORBIDDEN = ("cutlass", "torch", "triton", "cuda", "numpy", "ml_dtypes", "click", "rich", "yaml")

PROBE = """
import json, sys, time
def libraries():
    return sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})
before = set(libraries()), set(sys.modules)
start = time.perf_counter()
import mlakern
seconds = time.perf_counter() - start
touch = %r
for statement in touch:
    exec(statement)
print(json.dumps({
    "seconds": seconds,
    "modules": sorted(set(sys.modules) - before[1]),
    "libraries": [name for name in libraries() if name not in before[0]],
}))
"""


def probe(*statements: str) -> dict[str, list[str]]:
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "PYTHONSTARTUP")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE % (statements,)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def roots(found: dict[str, list[str]]) -> set[str]:
    return {name.partition(".")[0] for name in found["modules"]}


def test_import_loads_nothing_else() -> None:
    found = probe()
    assert not roots(found) & set(FORBIDDEN)
    assert [name for name in found["modules"] if name.startswith("mlakern")] == ["mlakern"]
    assert not [name for name in found["libraries"] if "libcuda" in name]


def test_import_takes_less_than_a_tenth_of_a_second() -> None:
    assert min(float(probe()["seconds"]) for _ in range(3)) < 0.1  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["load", "plan", "mla_decode", "preload", "open_store"])
def test_the_runtime_imports_neither_driver_nor_array_libraries(name: str) -> None:
    found = probe(f"mlakern.{name}")
    assert not roots(found) & set(FORBIDDEN)
    assert not [library for library in found["libraries"] if "libcuda" in library]


def test_planning_and_argument_building_need_the_standard_library_alone() -> None:
    found = probe(
        "mlakern.plan(mlakern.KernelConfig(), [130], num_heads=16, multiprocessors=148)",
        "import mlakern.runtime.arguments",
    )
    assert roots(found) - set(sys.stdlib_module_names) == {"mlakern"}
