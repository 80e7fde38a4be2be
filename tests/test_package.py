"""What the package promises about itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mlakern
from mlakern.sources import source_files

REPOSITORY = Path(__file__).parents[1]


def test_every_exported_name_exists_and_is_listed() -> None:
    for name in mlakern.__all__:
        assert getattr(mlakern, name).__name__ == name
        assert name in dir(mlakern)
    with pytest.raises(AttributeError, match="no attribute 'prefill'"):
        mlakern.prefill  # noqa: B018


def test_import_loads_nothing_but_the_package_itself() -> None:
    code = (
        "import sys; before = set(sys.modules); import mlakern; "
        "print(sorted(m for m in set(sys.modules) - before if m.startswith('mlakern')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['mlakern']\n"


def test_every_module_that_makes_a_kernel_is_in_the_source_digest() -> None:
    """Else a changed module would leave kernels in the store that no longer fit."""
    code = (
        "import sys, mlakern.build.compiler, mlakern.kernels.program; "
        "files = [m.__file__ for n, m in sys.modules.items() if n.startswith('mlakern.')]; "
        "print(*files, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {Path(line) for line in done.stdout.splitlines()}
    package = Path(mlakern.__file__).parent
    assert {path for path in loaded if path.parent == package / "kernels"}
    assert loaded - {package / "build/__init__.py"} <= set(source_files())


def test_bare_install_is_the_runtime_and_the_compiler_is_pinned() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    (bare,) = re.findall(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    assert bare == '"cuda-bindings>=13,<14", "platformdirs>=4"'
    assert re.findall(r'"nvidia-cutlass-dsl(.*?)"', project) == ["[cu13]==4.8.1"]


def test_hooks_use_the_versions_of_the_extra_dev() -> None:
    pinned = dict(
        re.findall(r'"(mypy|ruff)==([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    )
    assert sorted(pinned) == ["mypy", "ruff"]
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook["additional_dependencies"] for hook in config["repos"][0]["hooks"]}
    for hook in ("ruff-check", "ruff-format"):
        assert hooks[hook] == [f"ruff=={pinned['ruff']}"]
    assert f"mypy=={pinned['mypy']}" in hooks["mypy"]
