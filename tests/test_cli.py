from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_compiler import ended, wait_for
from manifests import publish_sample, sample_cubin, sample_manifest

import mlakern
from mlakern import store
from mlakern.build import runner
from mlakern.cli import main
from mlakern.cli.app import app
from mlakern.cli.common import emit_json
from mlakern.config import KernelConfig
from mlakern.runtime import driver
from mlakern.sources import source_digest
from mlakern.store import entry_directories, open_store

CONFIG = KernelConfig()
OTHER = KernelConfig(page_size=32)
MATRIX = """
sets:
  default: {axes: {page_size: [16, 32, 64]}}
  large: {include: [{page_size: 128}]}
"""


def call(*arguments: str | Path, **options: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def document(result: Result, code: int = 0) -> Any:
    """The one JSON document on standard output."""
    assert (result.exit_code, result.exception if code == 0 else None) == (code, None)
    return json.loads(result.stdout)


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    file = tmp_path / "matrix.yaml"
    file.write_text(MATRIX)
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


class TestGroup:
    def test_version_and_help(self) -> None:
        assert call("--version").stdout == f"mlakern, version {mlakern.__version__}\n"
        text = call("--help").stdout
        for name in (
            "build",
            "run",
            "list",
            "show",
            "verify",
            "budgets",
            "prune",
            "plan",
            "show-config",
        ):
            assert f"\n  {name} " in text
            assert call(name, "--help").exit_code == 0
            assert "--json" in call(name, "--help").stdout

    @pytest.mark.parametrize(
        "arguments",
        [
            ["compile"],
            ["list", "--colour"],
            ["show"],
            ["show", "mla_sm100a"],
            ["build", "--jobs", "0"],
            ["build", "--config", "mla_sm90a_m64_p64_causal_folded_grid_f32_bf16"],
            ["build", "--config", CONFIG.name, "--arch", "sm_100a"],
            ["prune", "--json"],
        ],
    )
    def test_wrong_usage_is_status_2(self, arguments: Sequence[str]) -> None:
        result = call(*arguments)
        assert result.exit_code == 2
        assert "Error: " in result.stderr
        assert result.stdout == ""

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["list", "--colour", "--json"], 2, "No such option"),
            (["show", "mla_sm100a", "--json"], 2, "got 2 parts, need 9"),
            (["show", "../../etc/passwd", "--json"], 2, "got 1 parts, need 9"),
            (["plan", "--heads", "0", "--seq-lens", "9", "--json"], 2, "num_heads: got 0"),
            (["plan", "--seq-lens", "1,,2", "--json"], 2, "got '1,,2', need integers"),
            (["plan", "--seq-lens", "1_0", "--json"], 2, "got '1_0', need integers"),
            (["run", "--mask", "round", "--all", "--json"], 2, "mask: got 'round', need one of"),
            (["run", CONFIG.name, "--seed", "-1", "--json"], 2, "-1 is not in the range"),
            (["build", "--jobs", "0", "--json"], 2, "0 is not in the range"),
            (["build", "--timeout", "0", "--json"], 2, "0 is not in the range"),
            (["verify", "--store", __file__, "--json"], 2, "is a file"),
            (["verify", "--store", "nowhere", "--json"], 3, "no kernels in nowhere, "),
            (["run", "--all", "--store", "nowhere", "--json"], 3, "no such kernel in nowhere, "),
            (["prune", "--store", "nowhere", "--yes", "--json"], 2, "does not exist"),
            (["nonsense", "--json"], 2, "No such command"),
        ],
    )
    def test_what_ends_a_command_early_is_a_document_too(
        self,
        arguments: Sequence[str],
        code: int,
        message: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["mlakern", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        error = json.loads(printed.out)
        assert (ended.value.code, error["status"]) == (code, {2: "usage", 3: "unavailable"}[code])
        assert message in error["error"]
        assert message in printed.err

    def test_numbers_that_json_does_not_have_are_null(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        emit_json({"a": [math.nan, 1.5, (math.inf,)], "b": {"c": -math.inf}})
        assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None]], "b": {"c": None}}

    @pytest.mark.parametrize(
        ("module", "extra", "arguments"),
        [
            ("click", "cli", ["list"]),
            ("rich", "cli", ["list"]),
            ("yaml", "cli", ["build"]),
            ("elftools", "build", ["build", "--config", CONFIG.name]),
        ],
    )
    def test_a_missing_extra_is_named_with_status_3(
        self, tmp_path: Path, module: str, extra: str, arguments: Sequence[str]
    ) -> None:
        """In a process in which the module cannot be imported."""
        code = (
            f"import sys; sys.modules[{module!r}] = None; sys.argv[1:] = {list(arguments)!r}; "
            "from mlakern.cli import main; main()"
        )
        (tmp_path / "build_matrix.yaml").write_text(MATRIX)
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(mlakern.__file__).parents[1])},
        )
        assert (done.returncode, done.stderr) == (
            3,
            f"mlakern: {module} is not installed; try pip install 'mlakern[{extra}]'\n",
        )

    def test_a_missing_extra_is_a_document_too(self) -> None:
        code = (
            "import sys; sys.modules['rich'] = None; sys.argv[1:] = ['list', '--json']; "
            "from mlakern.cli import main; main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, json.loads(done.stdout)) == (
            3,
            {
                "status": "unavailable",
                "error": "rich is not installed; try pip install 'mlakern[cli]'",
            },
        )


class TestBuild:
    @pytest.fixture(autouse=True)
    def _fake_compiler(self, fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runner, "COMPILER", fake)

    def test_builds_the_default_set(self, matrix: Path, root: Path) -> None:
        result = call("build", "--matrix", matrix, "--out", root)
        assert result.exit_code == 0
        for size in (16, 32, 64):
            config = KernelConfig(page_size=size)
            assert open_store(root).find(config).manifest.config == config
            assert config.name in result.stdout
        size = open_store(root).find(CONFIG).manifest.cubin.size
        lines = result.stdout.splitlines()
        assert lines[-1] == (
            f"cubins: {3 * size / 1e6:.1f} MB, the largest {size / 1e3:.1f} kB "
            f"({KernelConfig(page_size=16).name})"
        )
        assert lines[-2].startswith(f"3 of 3 present in {root}, after ")
        assert len(entry_directories(root)) == 3

    def test_json(self, matrix: Path, root: Path) -> None:
        first = document(call("build", "--matrix", matrix, "--out", root, "--json"))
        again = document(call("build", "--matrix", matrix, "--out", root, "--json"))
        assert first["store"] == str(root)
        assert [row["status"] for row in first["results"]] == ["built"] * 3
        assert [row["status"] for row in again["results"]] == ["present"] * 3
        row = again["results"][2]
        assert (row["name"], row["seconds"], row["error"]) == (CONFIG.name, 0.0, None)
        manifest = open_store(root).find(CONFIG).manifest
        assert row["cubin_bytes"] == manifest.cubin.size
        assert row["registers"] == {k.role: k.registers for k in manifest.kernels}

    def test_a_failure_is_status_1_and_a_row_and_costs_no_other(
        self, matrix: Path, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_BEHAVIOUR", "raise")
        result = call("build", "--matrix", matrix, "--out", root)
        assert result.exit_code == 1
        assert f"2 of 3 present in {root}" in result.stdout
        assert "RuntimeError: refused by the fake" in result.stderr
        assert "last words" in result.stderr
        rows = document(call("build", "--matrix", matrix, "--out", root, "--json"), 1)["results"]
        assert [(row["status"], row["error"]) for row in rows] == [
            ("present", None),
            ("failed", "RuntimeError: refused by the fake"),
            ("present", None),
        ]

    def test_sets_architectures_and_shares(self, matrix: Path, root: Path) -> None:
        common = ("build", "--matrix", matrix, "--out", root, "--json", "--arch", "sm_100a")
        sets = ("--set", "default", "--set", "large")
        names = [
            [row["name"] for row in document(call(*common, *sets, "--shard", share))["results"]]
            for share in ("1/3", "2/3", "3/3")
        ]
        assert [len(share) for share in names] == [2, 1, 1]
        assert sorted(name for share in names for name in share) == sorted(
            KernelConfig(page_size=size).name for size in (16, 32, 64, 128)
        )

    def test_single_configurations_go_to_the_user_cache(self) -> None:
        rows = document(call("build", "--config", OTHER.name, "--json"))
        assert rows["store"] == os.environ[store.CACHE_DIR_VARIABLE]
        assert open_store().find(OTHER).origin == "MLAKERN_CACHE_DIR"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--set", "none"], "no set 'none', need one of default, large"),
            (["--shard", "4/3"], "shard: got '4/3'"),
            (["--arch", "sm_90a"], "no configuration for sm_90a in default"),
            (["--matrix", "none.yaml"], "none.yaml: cannot be read"),
        ],
    )
    def test_a_wrong_selection_is_status_2(
        self, matrix: Path, options: Sequence[str], message: str
    ) -> None:
        result = call("build", "--matrix", matrix, *options)
        assert result.exit_code == 2
        assert message in result.stderr
        failed = call("build", "--matrix", matrix, *options, "--json")
        assert message in document(failed, 2)["error"]

    def test_without_the_compiler_is_status_3(
        self, matrix: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def absent(*_: Any, **__: Any) -> None:
            raise PackageNotFoundError("nvidia-cutlass-dsl")

        monkeypatch.setattr(runner, "build", absent)
        result = call("build", "--matrix", matrix)
        assert result.exit_code == 3
        assert "nvidia-cutlass-dsl is not installed; try pip install 'mlakern[build]'" in (
            result.stderr
        )

    def test_the_store_is_named_as_it_is(
        self, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = call("build", "--matrix", matrix, "--out", "[red] store")
        assert "3 of 3 present in [red] store" in result.stdout

    def test_a_store_that_cannot_be_written_is_status_3(self, matrix: Path) -> None:
        result = call("build", "--matrix", matrix, "--out", matrix / "store", "--json")
        error = document(result, 3)["error"]
        assert error.startswith(f"{matrix}/store: cannot be written: Not a directory; choose")

    def test_an_interrupt_is_status_130_and_leaves_no_process_and_no_half_entry(
        self, fake: str, matrix: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        processes = tmp_path / "processes"
        monkeypatch.setenv("FAKE_CHILD", str(processes))
        monkeypatch.setenv("FAKE_BEHAVIOUR", "hang")
        code = (
            f"from mlakern.build import runner; runner.COMPILER = {fake!r}; "
            "from mlakern.cli import main; main()"
        )
        options = ["build", "--matrix", str(matrix), "--out", str(root), "--jobs", "1", "--json"]
        build = subprocess.Popen(
            [sys.executable, "-c", code, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        pids = wait_for(lambda: processes.exists() and processes.read_text().split())
        build.send_signal(signal.SIGINT)
        out, err = build.communicate(timeout=30)
        assert (build.returncode, json.loads(out)) == (
            130,
            {"status": "interrupted", "error": "interrupted"},
        )
        assert "Traceback" not in err
        for pid in map(int, pids):
            assert wait_for(lambda pid=pid: ended(pid))
        # The first configuration was built before the second one hung.
        assert [path.name.partition("-")[0] for path in root.iterdir()] == [
            KernelConfig(page_size=16).name
        ]

    def test_without_a_place_for_the_cache_is_status_3(
        self, matrix: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mlakern.cli.build.user_cache", lambda: None)
        result = call("build", "--matrix", matrix)
        assert (result.exit_code, "try --out" in result.stderr) == (3, True)


class TestList:
    def test_states(self, root: Path) -> None:
        cache = Path(os.environ[store.CACHE_DIR_VARIABLE])
        serving = publish_sample(root)
        stale = publish_sample(root, sources="ee" * 32, key="e" * 64)
        damaged = publish_sample(root, OTHER)
        (damaged / "manifest.json").write_text("{")
        shadowed = publish_sample(cache)
        foreign = publish_sample(cache, OTHER)
        (foreign / "manifest.json").write_text('{"schema": 0}')
        rows = document(call("list", "--store", root, "--json"))
        assert {row["path"]: row["state"] for row in rows} == {
            str(serving): "serves",
            str(stale): "stale",
            str(damaged): "damaged",
            str(shadowed): "shadowed",
            str(foreign): "foreign",
        }
        by_path = {row["path"]: row for row in rows}
        assert by_path[str(serving)]["name"] == CONFIG.name
        assert by_path[str(serving)]["origin"] == "path given"
        assert by_path[str(shadowed)]["origin"] == "MLAKERN_CACHE_DIR"
        assert by_path[str(serving)]["cubin_bytes"] == len(sample_cubin())
        roles = ("attention", "combine", "combine_bands2")
        assert by_path[str(serving)]["registers"] == dict.fromkeys(roles, 168)
        text = call("list", "--store", root).stdout
        for path in (serving, stale, damaged, shadowed, foreign):
            assert path.name in text

    def test_names_are_printed_as_they_are(self, root: Path) -> None:
        (root / "mla_[red]").mkdir(parents=True)
        assert "mla_[red]" in call("list", "--store", root).stdout

    def test_an_empty_store(self, root: Path) -> None:
        assert document(call("list", "--store", root, "--json")) == []
        assert f"no kernels in {root}, " in call("list", "--store", root).stderr


class TestShow:
    def test_json_is_the_manifest(self, root: Path) -> None:
        path = publish_sample(root)
        result = call("show", CONFIG.name, "--store", root, "--json")
        assert result.stdout == (path / "manifest.json").read_text()

    def test_text_has_every_parameter(self, root: Path) -> None:
        path = publish_sample(root)
        result = call("show", CONFIG.name, "--store", root)
        assert result.exit_code == 0
        assert str(path) in result.stdout
        for kernel in sample_manifest().kernels:
            for parameter in kernel.parameters:
                assert parameter.name in result.stdout
                assert parameter.meaning in result.stdout

    def test_a_missing_kernel_is_status_3(self, root: Path) -> None:
        publish_sample(root, OTHER)
        result = call("show", CONFIG.name, "--store", root)
        assert result.exit_code == 3
        assert f"nearest: {OTHER.name}" in result.stderr
        error = document(call("show", CONFIG.name, "--store", root, "--json"), 3)
        assert error["status"] == "unavailable"
        assert f"build it: mlakern build --config {CONFIG.name}" in error["error"]


class TestVerify:
    def test_intact_is_status_0(self, root: Path) -> None:
        for config in (CONFIG, OTHER):
            publish_sample(root, config)
        result = document(call("verify", "--store", root, "--json"))
        assert result["status"] == "ok"
        assert [row["state"] for row in result["results"]] == ["serves", "serves"]
        assert "2 of 2 intact" in call("verify", "--store", root).stdout

    @pytest.mark.parametrize("name", ["kernel.cubin", "kernel.ptx", "manifest.json"])
    def test_damage_is_status_1_whatever_is_allowed(
        self, root: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(store.UNVERIFIED_VARIABLE, "1")
        publish_sample(root, OTHER)
        file = publish_sample(root) / name
        file.write_bytes(file.read_bytes().replace(b"0", b"1", 1).replace(b"\x10", b"\x11", 1))
        result = call("verify", "--store", root)
        assert result.exit_code == 1
        assert f"{file.parent}: FAIL" in result.stdout
        assert "1 of 2 intact" in result.stdout
        report = document(call("verify", "--store", root, "--json"), 1)
        assert report["status"] == "failed"
        damaged = {row["path"]: row["error"] for row in report["results"] if row["error"]}
        assert list(damaged) == [str(file.parent)]
        assert name in damaged[str(file.parent)]

    def test_a_cubin_of_another_architecture_is_status_1(self, root: Path) -> None:
        publish_sample(root, cubin=sample_cubin(90))
        result = call("verify", "--store", root)
        assert result.exit_code == 1
        assert "code for sm_90, need sm_100a" in result.stdout


class TestPrune:
    def test_asks_and_removes(self, root: Path) -> None:
        good = publish_sample(root)
        stale = publish_sample(root, OTHER, sources="ee" * 32)
        kept = call("prune", "--store", root, input="n\n")
        assert kept.exit_code == 0
        assert f"{stale}: built from other kernel sources" in kept.stdout
        assert stale.exists()
        assert call("prune", "--store", root, input="y\n").exit_code == 0
        assert list(root.iterdir()) == [good]

    def test_json_removes_without_asking(self) -> None:
        cache = Path(os.environ[store.CACHE_DIR_VARIABLE])
        stale = publish_sample(cache, OTHER, sources="ee" * 32)
        assert document(call("prune", "--yes", "--json")) == {
            "store": str(cache),
            "removed": [{"path": str(stale), "reason": "built from other kernel sources"}],
        }
        assert document(call("prune", "--yes", "--json"))["removed"] == []


class TestShowConfig:
    def test_winner_and_environment(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(store.CUBIN_DIR_VARIABLE, str(root))
        publish_sample(root, sources="ee" * 32)
        publish_sample(store.PACKAGED)
        report = document(call("show-config", "--json"))
        assert report["mlakern"] == mlakern.__version__
        assert report["kernel_sources"] == source_digest()
        assert report["environment"][store.CUBIN_DIR_VARIABLE] == str(root)
        assert [
            (r["origin"], r["kernels"], r["serving"], r["winner"]) for r in report["search"]
        ] == [
            ("MLAKERN_CUBIN_DIR", 1, 0, False),
            ("package", 1, 1, True),
            ("MLAKERN_CACHE_DIR", 0, 0, False),
        ]
        text = call("show-config").stdout
        assert f"{store.PACKAGED} (package): 1 of 1 serve <- wins" in text

    def test_no_driver_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def absent() -> int:
            raise driver.DriverUnavailableError("CUDA driver: cannot be loaded")

        monkeypatch.setattr(driver, "driver_version", absent)
        report = document(call("show-config", "--json"))
        assert report["cuda"] == {
            "driver": None,
            "devices": [],
            "reason": "CUDA driver: cannot be loaded",
        }
        assert "no CUDA: CUDA driver: cannot be loaded" in call("show-config").stdout

    def test_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = {
            "driver_version": lambda: 13000,
            "device_count": lambda: 1,
            "architecture": lambda _: "sm_100a",
            "multiprocessors": lambda _: 148,
        }
        for name, fact in facts.items():
            monkeypatch.setattr(driver, name, fact)
        assert document(call("show-config", "--json"))["cuda"] == {
            "driver": 13000,
            "devices": [{"arch": "sm_100a", "multiprocessors": 148}],
            "reason": None,
        }
        assert "device 0: sm_100a, 148 multiprocessors" in call("show-config").stdout
