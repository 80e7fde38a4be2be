from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic_sass
from click.testing import CliRunner, Result
from manifests import publish_sample, sample_manifest

from mlakern.cli.app import app
from mlakern.config import KernelConfig
from mlakern.matrix import load_matrix
from mlakern.performance import budgets, disassembly
from mlakern.performance.budgets import Budget, BudgetError, Excess, excesses
from mlakern.performance.disassembly import functions
from mlakern.performance.profile import Profile, main_loops

REPOSITORY = Path(__file__).parents[2]
BUDGET = Budget(100_000, 168, 232_064, 0, {"mma": 7, "softmax": 11})


class TestExcesses:
    @pytest.mark.parametrize(
        ("change", "found"),
        [
            ({}, []),
            ({"cubin_bytes": 103_000}, []),
            ({"cubin_bytes": 103_001}, [("cubin_bytes", 103_001, 100_000)]),
            ({"cubin_bytes": 50_000, "registers": 100}, []),
            ({"registers": 169}, [("registers", 169, 168)]),
            ({"spill_bytes": 4}, [("spill_bytes", 4, 0)]),
            ({"shared_bytes": 232_065}, [("shared_bytes", 232_065, 232_064)]),
            ({"loops": {"mma": 7, "softmax": 12}}, [("loop softmax", 12, 11)]),
            ({"loops": {"mma": 6, "softmax": 11}}, []),
            ({"loops": {"mma": 7, "softmax": 11, "load_k": 1}}, [("loop load_k", 1, None)]),
        ],
    )
    def test_what_is_above(
        self, change: dict[str, Any], found: list[tuple[str, int, int | None]]
    ) -> None:
        measured = replace(BUDGET, **change)
        assert excesses("k", measured, BUDGET) == [Excess("k", *each) for each in found]

    def test_a_planted_instruction_is_found(self) -> None:
        """From the machine code on: one more instruction in the softmax loop."""

        def budget_of(lines: str) -> Budget:
            found = functions(synthetic_sass.text(lines))
            loops = main_loops(found[synthetic_sass.ENTRY])
            return Budget.of(Profile(sample_manifest(KernelConfig()), {}, loops))

        lines = synthetic_sass.lines()
        planted = lines.replace("\tMUFU.EX2 R7, R7\n", "\tMUFU.EX2 R7, R7\n\tFADD R7, R7, R8\n")
        assert planted != lines
        assert excesses("k", budget_of(lines), budget_of(lines)) == []
        assert excesses("k", budget_of(planted), budget_of(lines)) == [
            Excess("k", "loop softmax", 12, 11)
        ]


class TestFile:
    def test_one_sorted_line_for_each_and_what_was_written_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "budgets.json"
        written = {"b": BUDGET, "a": replace(BUDGET, registers=160)}
        budgets.write(file, written)
        lines = file.read_text().splitlines()
        assert [line[:4] for line in lines] == ["{", '"a":', '"b":', "}"]
        assert lines[1].startswith('"a": {"cubin_bytes": 100000, "registers": 160,')
        assert budgets.read(file) == written

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not JSON"),
            ("[]", "got list, need an object"),
            ('{"a": {"registers": 1}}', "a: need cubin_bytes, loops, registers"),
            (
                '{"a": {"cubin_bytes": 1, "registers": true, "shared_bytes": 1, "spill_bytes": 0,'
                ' "loops": {}}}',
                "a: need whole numbers",
            ),
        ],
    )
    def test_a_wrong_file_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "budgets.json"
        file.write_text(text)
        with pytest.raises(BudgetError, match=message):
            budgets.read(file)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(BudgetError, match=r"nowhere\.json: cannot be read: No such file"):
            budgets.read(tmp_path / "nowhere.json")

    def test_the_repository_has_a_line_for_each_released_kernel(self) -> None:
        release = load_matrix(REPOSITORY / "build_matrix.yaml").sets["release"]
        kept = budgets.read(REPOSITORY / budgets.FILE_NAME)
        assert sorted(kept) == sorted(item.config.name for item in release)
        assert all(budget.spill_bytes == 0 for budget in kept.values())


class TestCommand:
    """On a store with one sample kernel, whose machine code is the synthetic one."""

    CONFIG = KernelConfig()

    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        publish_sample(tmp_path / "store", self.CONFIG)
        (tmp_path / "matrix.yaml").write_text("sets: {release: {include: [{page_size: 64}]}}\n")
        manifest = sample_manifest(self.CONFIG)
        entries = {kernel.role: kernel.entry for kernel in manifest.kernels}
        attention = synthetic_sass.text().replace(synthetic_sass.ENTRY, entries.pop("attention"))
        others = "".join(f".text.{name}:\n  /*0000*/  EXIT ;\n" for name in entries.values())
        monkeypatch.setattr("mlakern.performance.profile.disassemble", lambda _: attention + others)
        self.folder = tmp_path

    def call(self, *arguments: str) -> Result:
        common = ("--matrix", str(self.folder / "matrix.yaml"), "--store", "store")
        common = (*common[:-1], str(self.folder / "store"))
        file = str(self.folder / "budgets.json")
        return CliRunner().invoke(app, ["budgets", *common, "--file", file, *arguments])

    def test_update_then_compare_then_growth(self) -> None:
        assert self.call("--update").exit_code == 0
        same = self.call("--json")
        assert (same.exit_code, json.loads(same.stdout)) == (0, {"status": "ok", "above": []})
        file = self.folder / "budgets.json"
        text = file.read_text()
        assert '"softmax": 11' in text
        file.write_text(text.replace('"softmax": 11', '"softmax": 10'))
        result = self.call("--json")
        assert result.exit_code == 1
        above = [{"name": self.CONFIG.name, "item": "loop softmax", "got": 11, "budget": 10}]
        assert json.loads(result.stdout) == {"status": "failed", "above": above}
        table = self.call().stdout
        assert "+10.0%" in table
        assert "run with --update and commit the file" in table

    def test_a_kernel_without_budget_fails(self) -> None:
        (self.folder / "budgets.json").write_text("{}\n")
        result = self.call("--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["above"][0]["budget"] is None

    def test_a_kernel_that_is_not_built_cannot_be_compared(self) -> None:
        (self.folder / "matrix.yaml").write_text(
            "sets: {release: {include: [{page_size: 64}, {page_size: 16}]}}\n"
        )
        result = self.call("--update")
        assert result.exit_code == 3
        assert "build the set first: no kernel mla_sm100a_m128_p16" in result.stderr
        assert not (self.folder / "budgets.json").exists()

    def test_without_nvdisasm_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mlakern.performance.profile.disassemble", disassembly.disassemble)
        monkeypatch.setattr(disassembly, "_PACKAGE", "no-such-package")
        result = self.call("--update")
        assert result.exit_code == 3
        assert "no-such-package is not installed; try pip install 'mlakern[build]'" in result.stderr
