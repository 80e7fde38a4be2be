from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path

import fake_check
import pytest
from click.testing import CliRunner, Result
from manifests import publish_sample

import mlakern
from mlakern.cli.app import app
from mlakern.config import KernelConfig
from mlakern.matrix import load_matrix
from mlakern.store import Entry, read_entry
from mlakern.validation import sweep as sweeps
from mlakern.validation.run import Report
from mlakern.validation.sweep import (
    Finding,
    check,
    identity,
    problems,
    read_journal,
    statement,
    sweep,
    write_journal,
)
from mlakern.validation.sweep_report import markdown

SIZES = (16, 32, 64, 128)
RELEASE = [
    item.config
    for item in load_matrix(Path(__file__).parents[1] / "build_matrix.yaml").sets["release"]
]


@pytest.fixture
def entries(tmp_path: Path) -> list[Entry]:
    root = tmp_path / "store"
    return [read_entry(publish_sample(root, KernelConfig(page_size=p)), "path") for p in SIZES]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "log"
    file.touch()
    monkeypatch.setenv("FAKE_CHECK_LOG", str(file))
    monkeypatch.delenv("FAKE_CHECK", raising=False)
    return file


def names(*sizes: int) -> list[str]:
    return sorted(KernelConfig(page_size=size).name for size in sizes)


class TestProblems:
    def test_each_released_kernel_has_two_one_with_an_empty_and_a_one_key_request(self) -> None:
        for config in RELEASE:
            specs = [spec for spec, _ in problems(config)]
            assert len(specs) == 2
            held = [spec.held_lens(config.mask) for spec in specs]
            assert held[1][:2] == (0, 1), config.name
            # Longer than two key tiles, and not whole ones.
            assert max(held[0]) > 256
            assert all(length % 128 for length in held[0])

    def test_each_is_a_problem_that_its_kernel_takes(self) -> None:
        for config in RELEASE:
            mixed, edges = (spec.plan(config, 8) for spec, _ in problems(config))
            assert mixed.splits == (1 if config.schedule == "work_list" else 2)
            assert mixed.query_tiles == edges.query_tiles == (2 if config.pack_q else 1)

    def test_the_race_detector_watches_one(self) -> None:
        assert [races for _, races in problems(KernelConfig())] == [False, True]

    def test_the_statement_says_what_was_run(self) -> None:
        config = KernelConfig(mask="dcp")
        first, second = statement(config).split("; ")
        assert first.startswith("B 2, H 16, Sq 3, K 263, 1033, rank 1 of 2, 4 keys each, splits 2")
        assert second.startswith("B 3, H 16, Sq 3, K 0, 1, 258, rank 0 of 2, 4 keys each, ")
        assert second.endswith("LSE base e, race detector")


class TestCheck:
    @pytest.fixture
    def entry(self, entries: list[Entry]) -> Entry:
        return entries[0]

    def test_one_failure_of_two_fails_and_keeps_its_reason(
        self, entry: Entry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = entry.manifest.config
        (first, _), (second, _) = problems(config)
        outcomes = {
            first: Report(config, "emulator", first, "pass", seconds=1.0),
            second: Report(config, "emulator", second, "fail", seconds=0.5, reason="race at 3"),
        }
        monkeypatch.setattr(sweeps, "validate", lambda _, spec, __: outcomes[spec])
        finding = check(entry)
        assert (finding.status, finding.reason, finding.seconds) == ("fail", "race at 3", 1.5)

    def test_whatever_is_raised_fails_with_its_text(
        self, entry: Entry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def validate(*_: object) -> Report:
            raise KeyError("no such thing")

        monkeypatch.setattr(sweeps, "validate", validate)
        finding = check(entry)
        assert (finding.status, finding.reason) == ("fail", "KeyError: 'no such thing'")


class TestIdentity:
    def test_another_cubin_other_problems_or_other_judges_are_run_again(
        self, entries: list[Entry], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = entries[0]
        same = identity(entry)
        assert identity(entry) == same
        file = replace(entry.manifest.cubin, sha256="0" * 64)
        assert identity(replace(entry, manifest=replace(entry.manifest, cubin=file))) != same
        monkeypatch.setattr(sweeps, "_judges", lambda: "another emulator")
        other = identity(entry)
        assert other != same
        spec, races = problems(entry.manifest.config)[0]
        monkeypatch.setattr(sweeps, "problems", lambda _: ((replace(spec, seed=1), races),))
        assert identity(entry) not in (same, other)


class TestSweep:
    def test_a_second_sweep_runs_only_what_changed(
        self, entries: list[Entry], tmp_path: Path, log: Path
    ) -> None:
        journal = tmp_path / "j.jsonl"
        first = list(sweep(entries, journal, 2, fake_check.run))
        assert sorted(finding.name for finding in first) == names(*SIZES)
        assert sorted(log.read_text().split()) == names(*SIZES)
        changed = publish_sample(
            tmp_path / "other", KernelConfig(page_size=32), cubin=entries[0].load_cubin() + b"\0"
        )
        again = [entries[0], read_entry(changed, "path"), *entries[2:]]
        second = list(sweep(again, journal, 2, fake_check.run))
        assert log.read_text().split()[len(SIZES) :] == names(32)
        assert len(second) == len(SIZES)

    def test_a_killed_sweep_goes_on_where_it_was(
        self, entries: list[Entry], tmp_path: Path, log: Path
    ) -> None:
        """kill -9 while the last kernel runs; its worker ends too."""
        journal = tmp_path / "j.jsonl"
        code = (
            "import sys, pathlib, fake_check; from mlakern.store import read_entry; "
            "from mlakern.validation.sweep import sweep\n"
            "if __name__ == '__main__':\n"
            "    entries = [read_entry(pathlib.Path(p), 'path') for p in sys.argv[2:]]\n"
            "    list(sweep(entries, pathlib.Path(sys.argv[1]), 1, fake_check.run))\n"
        )
        script = tmp_path / "script.py"
        script.write_text(code)
        paths = [str(Path(mlakern.__file__).parents[1]), str(Path(fake_check.__file__).parent)]
        victim = subprocess.Popen(
            [sys.executable, script, journal, *(str(entry.path) for entry in entries)],
            env={**os.environ, "FAKE_CHECK": "hang", "PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            _wait_until(lambda: len(log.read_text().split()) == len(SIZES))
            _wait_until(lambda: len(read_journal(journal)) == len(SIZES) - 1)
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.wait()
        # What a kill in the middle of a write leaves.
        with journal.open("a") as file:
            file.write('{"name": "mla_')
        findings = list(sweep(entries, journal, 1, fake_check.run))
        assert sorted(finding.name for finding in findings) == names(*SIZES)
        assert log.read_text().split()[len(SIZES) :] == names(128)
        assert sorted(finding.name for finding in read_journal(journal)) == names(*SIZES)

    def test_a_worker_that_dies_costs_no_finished_kernel(
        self, entries: list[Entry], tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = tmp_path / "j.jsonl"
        monkeypatch.setenv("FAKE_CHECK", "die")
        with pytest.raises(BrokenExecutor):
            list(sweep(entries, journal, 1, fake_check.run))
        assert sorted(finding.name for finding in read_journal(journal)) == names(16, 32, 64)
        assert len(log.read_text().split()) == len(SIZES)


def test_a_journal_is_replaced_by_sorted_findings(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    journal.write_text("garbage\n")
    one = Finding("b", "0" * 64, "1", "pass", "ran", {"lse_vs_exact": 0.5}, 1.0)
    two = replace(one, name="a")
    write_journal(journal, [one, two])
    assert read_journal(journal) == [two, one]
    assert len(journal.read_text().splitlines()) == 2


def test_the_report_has_a_line_for_each_kernel() -> None:
    good = Finding(
        **{"name": "b", "cubin_sha256": "ab" * 32, "identity": "", "status": "pass"},
        **{"statement": "B 2, K 1", "seconds": 1.0},
        worst={"kernel_vs_modelled_out_bf16": 0.015, "lse_vs_exact": 0.25, "poisoned_memory": 0.0},
    )
    bad = replace(good, name="a", status="fail", reason="a | race\nin warp 3")
    text = markdown([good, bad])
    assert "1 of 2 kernels passed every problem" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `a` | abababababab | 1.5% |  |  | 25.0% | FAIL: a \\| race in warp 3 | B 2, K 1 |",
        "| `b` | abababababab | 1.5% |  |  | 25.0% | PASS | B 2, K 1 |",
    ]
    assert markdown([bad, good]) == text


class TestCommand:
    @pytest.fixture(autouse=True)
    def _fake(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def with_fake(entries: list[Entry], journal: Path, jobs: int) -> object:
            return sweep(entries, journal, jobs, fake_check.run)

        monkeypatch.setattr(sweeps, "sweep", with_fake)
        self.log = log

    def call(self, *arguments: str | Path) -> Result:
        return CliRunner().invoke(app, ["verify", *map(str, arguments)])

    def test_report_of_a_store(self, entries: list[Entry], tmp_path: Path) -> None:
        report = tmp_path / "verification.md"
        common = ("--store", entries[0].path.parent, "--report", report)
        result = self.call(*common, "--jobs", "1")
        assert (result.exit_code, result.stderr.strip()) == (0, "")
        assert "4 of 4 passed" in result.stdout
        assert report.read_text().count("| PASS |") == 4
        first = report.read_text()
        assert self.call(*common, "--json").exit_code == 0
        assert len(self.log.read_text().split()) == 4
        assert report.read_text() == first

    def test_a_failure_is_status_1(
        self, entries: list[Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_CHECK", "fail")
        report = tmp_path / "verification.md"
        result = self.call("--store", entries[0].path.parent, "--report", report, "--json")
        assert result.exit_code == 1
        document = json.loads(result.stdout)
        assert (document["status"], document["passed"]) == ("failed", 3)
        assert document["failed"] == {names(128)[0]: "lse_vs_exact 0.004 > 0.002"}
        assert "| FAIL: lse_vs_exact 0.004 > 0.002 |" in report.read_text()

    def test_shares_and_sets(self, entries: list[Entry], tmp_path: Path) -> None:
        common = ("--store", entries[0].path.parent, "--report", tmp_path / "v.md")
        assert self.call(*common, "--shard", "2/2").exit_code == 0
        assert self.log.read_text().split() == names(32, 128)[::-1]
        matrix = tmp_path / "matrix.yaml"
        matrix.write_text("sets: {s: {axes: {page_size: [16, 64]}}, t: {include: [{tile_m: 64}]}}")
        assert self.call(*common, "--matrix", matrix, "--set", "s").exit_code == 0
        assert [f.name for f in read_journal(tmp_path / "v.jsonl")] == names(16, 64)
        result = self.call(*common, "--matrix", matrix, "--set", "t")
        assert result.exit_code == 3
        assert "build the set first: no kernel mla_sm100a_m64_p64" in result.stderr

    def test_an_empty_store_proves_nothing(self, tmp_path: Path) -> None:
        result = self.call("--store", tmp_path, "--report", tmp_path / "v.md")
        assert result.exit_code == 3
        assert not (tmp_path / "v.md").exists()

    def test_a_set_without_report_is_usage(self, tmp_path: Path) -> None:
        result = self.call("--store", tmp_path, "--set", "release")
        assert result.exit_code == 2


def _wait_until(condition: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
