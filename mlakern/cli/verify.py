"""mlakern verify: stored files against their manifests, kernels against the references."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mlakern.cli.common import (
    ExitCode,
    console,
    emit_json,
    json_option,
    output,
    stop,
    store_option,
)
from mlakern.cli.kernels import document_of, listing
from mlakern.matrix import MatrixError, load_matrix, parse_shard
from mlakern.store import Entry, MissingKernelError, Store, open_store


@click.command()
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Run every kernel on the emulator; write this Markdown file, and its data beside it.",
)
@click.option("--set", "sets", multiple=True, help="With --report: only this set [all present].")
@click.option("--matrix", type=click.Path(path_type=Path), default="build_matrix.yaml")
@click.option("--shard", default="1/1", metavar="I/N", help="With --report: the I-th of N shares.")
@click.option("--jobs", type=click.IntRange(min=1), help="With --report: processes [CPUs].")
@store_option
@json_option
def verify(
    report: Path | None,
    sets: tuple[str, ...],
    matrix: Path,
    shard: str,
    jobs: int | None,
    store_path: Path | None,
    as_json: bool,
) -> None:
    """Check every stored file against its manifest: size, SHA-256, architecture.

    With --report each kernel is also run on at least two problems on the emulator and compared with
    both references. What is finished is kept in the report's data (.jsonl): a run that was killed
    goes on, and a kernel that has not changed is not run again.

    Exit status 1 if a file is damaged or a kernel wrong, 3 if there is none or one of the set is
    not built.
    """
    store = open_store(store_path)
    if report is None:
        if sets or shard != "1/1":
            raise click.UsageError("--set and --shard need --report")
        _check_files(store, as_json)
        return
    entries = _entries(store, sets, matrix, shard)
    if not entries:
        stop(ExitCode.UNAVAILABLE, "no kernel to run; try mlakern build")
    _sweep(entries, report, jobs or len(os.sched_getaffinity(0)), as_json)


def _check_files(store: Store, as_json: bool) -> None:
    rows = listing(store, check_files=True)
    if not rows:
        stop(ExitCode.UNAVAILABLE, f"no kernels in {store.places}")
    damaged = [row for row in rows if row.state == "damaged"]
    if as_json:
        emit_json(
            {
                "status": "failed" if damaged else "ok",
                "results": [document_of(row) for row in rows],
            }
        )
    else:
        for row in rows:
            verdict = f"FAIL {row.error}" if row.error else "ok"
            output.print(f"{row.path}: {verdict}", markup=False)
        output.print(f"{len(rows) - len(damaged)} of {len(rows)} intact", markup=False)
    if damaged:
        click.get_current_context().exit(ExitCode.FAILED)


def _entries(store: Store, sets: Sequence[str], matrix: Path, shard: str) -> list[Entry]:
    try:
        if sets:
            items = load_matrix(matrix).select(sets, shard=shard)
            return [store.find(item.config) for item in items]
        index, count = parse_shard(shard)
    except MatrixError as error:
        stop(ExitCode.USAGE, str(error))
    except MissingKernelError as error:
        stop(ExitCode.UNAVAILABLE, f"build the set first: {error}")
    serving = [row.entry for row in listing(store) if row.entry and row.state == "serves"]
    serving.sort(key=lambda entry: entry.manifest.config)
    return serving[index - 1 :: count]


def _sweep(entries: Sequence[Entry], report: Path, jobs: int, as_json: bool) -> None:
    from mlakern.validation.sweep import sweep, write_journal
    from mlakern.validation.sweep_report import markdown

    journal = report.with_suffix(".jsonl")
    findings = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("running", total=len(entries))
        try:
            for finding in sweep(entries, journal, jobs):
                findings.append(finding)
                progress.update(task, advance=1, description=finding.name)
        except BrokenExecutor as error:
            stop(ExitCode.FAILED, f"a worker process died: {error}; run again to go on")
        except OSError as error:
            stop(ExitCode.FAILED, f"{journal}: cannot be written: {error.strerror}")
    write_journal(journal, findings)
    report.write_text(markdown(findings), encoding="utf-8")
    failed = [finding for finding in findings if not finding.passed]
    if as_json:
        emit_json(
            {
                "status": "failed" if failed else "ok",
                "report": str(report),
                "passed": len(findings) - len(failed),
                "failed": {finding.name: finding.reason for finding in failed},
            }
        )
    else:
        for finding in failed:
            output.print(f"{finding.name}: FAIL {finding.reason}", markup=False, soft_wrap=True)
        output.print(
            f"{len(findings) - len(failed)} of {len(findings)} passed; report in {report}",
            markup=False,
            soft_wrap=True,
        )
    if failed:
        click.get_current_context().exit(ExitCode.FAILED)
