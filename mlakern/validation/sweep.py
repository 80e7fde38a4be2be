"""A sweep: every kernel of a set on several problems each, resumable, with a report to ship.

Each finished kernel is one line of JSON, appended and flushed at once, so that a sweep that was
killed goes on where it was. A line is believed again only for the same cubin and PTX, the same
problems and the same sources of whatever judged them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mlakern.config import KernelConfig
from mlakern.runtime.arguments import Scalars
from mlakern.store import Entry, read_entry
from mlakern.validation.backends import EmulatorBackend
from mlakern.validation.run import FAIL, PASS, Report, validate
from mlakern.validation.spec import MODEL_SCALE, ProblemSpec

_PACKAGE = Path(__file__).parents[1]
# What judges a kernel; the sources it was made from are in its cubin's own identity.
_JUDGES = ("*.py", "emulator/**/*.py", "validation/*.py", "runtime/*.py")


@dataclass(frozen=True)
class Finding:
    """What became of one kernel on its problems.

    statement: one line that says what was run. worst: error over bound by the error's name, the
    largest of all problems. identity: what must be equal for the line to be believed again.
    """

    name: str
    cubin_sha256: str
    identity: str
    status: str
    statement: str
    worst: Mapping[str, float]
    seconds: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.status == PASS


def problems(config: KernelConfig) -> tuple[tuple[ProblemSpec, bool], ...]:
    """The problems of a configuration, each with whether the race detector watches.

    The first has mixed lengths in two splits and a maximum that moves with each tile; the second an
    empty request, one of a single key and one that ends just into a tile. Queries are several
    tokens, packed ones cross a tile's edge. The data differ from configuration to configuration.
    """
    heads, tokens = (24, 6) if config.pack_q else (16, 3)
    base = ProblemSpec(
        num_heads=heads,
        seq_len_q=tokens,
        window_left=200,
        cp_world=2,
        cp_interleave=4,
        seed=zlib.crc32(config.name.encode()),
    )
    # What the rank of each problem holds is about the same with every mask.
    dcp = config.mask == "dcp"
    mixed = replace(
        base,
        seq_lens=(263, 1033) if dcp else (130, 515),
        cp_rank=1,
        splits=None if config.schedule == "work_list" else 2,
        values="ramp",
        scalars=Scalars(softmax_scale=MODEL_SCALE, rescale_threshold=2.0),
    )
    edges = replace(
        base,
        # Of two ranks the first has the only key of the second request.
        seq_lens=(0, 1, 258 if dcp else 129),
        scalars=Scalars(softmax_scale=MODEL_SCALE, output_scale=0.5, lse_base="e"),
    )
    return (mixed, False), (edges, True)


def check(entry: Entry) -> Finding:
    """Run a kernel's problems on the emulator; whatever is raised is a failure with its text."""
    reports: list[Report] = []
    reason = ""
    for spec, races in problems(entry.manifest.config):
        try:
            reports.append(validate(entry, spec, EmulatorBackend(races)))
        except Exception as error:  # one kernel's failure is one line
            reason = f"{type(error).__name__}: {error}"
            break
    failed = [report.reason for report in reports if report.status != PASS]
    reason = "; ".join([*failed, *([reason] if reason else [])])
    return Finding(
        name=entry.manifest.config.name,
        cubin_sha256=entry.manifest.cubin.sha256,
        identity=identity(entry),
        status=FAIL if reason else PASS,
        statement=statement(entry.manifest.config),
        worst=_worst(reports),
        seconds=round(sum(report.seconds for report in reports), 2),
        reason=reason,
    )


def identity(entry: Entry) -> str:
    """SHA-256 over the kernel's files, its problems and the sources that judge it."""
    manifest = entry.manifest
    parts = [manifest.cubin.sha256, manifest.ptx.sha256, _judges(), *_described(manifest.config)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def statement(config: KernelConfig) -> str:
    """What is run, in one line."""
    return "; ".join(_described(config))


def check_at(path: Path, origin: str) -> Finding:
    """The finding on the entry in a folder of a store."""
    return check(read_entry(path, origin))


def sweep(
    entries: Sequence[Entry],
    journal: Path,
    jobs: int,
    run: Callable[[Path, str], Finding] = check_at,
) -> Iterator[Finding]:
    """The findings as they come: first what the journal holds already, then what is run now.

    jobs: worker processes. run: what a worker calls; it must be importable.

    Raises concurrent.futures.BrokenExecutor if a worker process died; what had finished is kept.
    """
    known = {finding.name: finding for finding in read_journal(journal)}
    pending = []
    for entry in entries:
        finding = known.get(entry.manifest.config.name)
        if finding is not None and finding.identity == identity(entry):
            yield finding
        else:
            pending.append(entry)
    if not pending:
        return
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(min(jobs, len(pending)), context, _die_with_parent) as pool,
        journal.open("a", encoding="utf-8") as file,
    ):
        _end_last_line(journal, file)
        futures = [pool.submit(run, entry.path, entry.origin) for entry in pending]
        try:
            for future in as_completed(futures):
                finding = future.result()
                file.write(json.dumps(asdict(finding), sort_keys=True) + "\n")
                file.flush()
                os.fsync(file.fileno())
                yield finding
        finally:
            pool.shutdown(cancel_futures=True)


def read_journal(journal: Path) -> list[Finding]:
    """The findings in a journal, in its order, without lines that a kill cut short."""
    if not journal.exists():
        return []
    findings = []
    for line in journal.read_text(encoding="utf-8").splitlines():
        try:
            findings.append(Finding(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return findings


def write_journal(journal: Path, findings: Sequence[Finding]) -> None:
    """Exactly these findings, sorted by name, in place of what the journal held."""
    lines = [
        json.dumps(asdict(finding), sort_keys=True)
        for finding in sorted(findings, key=lambda finding: finding.name)
    ]
    temporary = journal.with_name(journal.name + ".tmp")
    temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    temporary.replace(journal)


def _die_with_parent() -> None:
    """A worker of a sweep that was killed would wait for work forever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end_last_line(journal: Path, file: Any) -> None:
    """What a killed sweep left of its last line must not swallow the next one."""
    if journal.stat().st_size and not journal.read_bytes().endswith(b"\n"):
        file.write("\n")


def _worst(reports: Sequence[Report]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for report in reports:
        for measured in report.errors:
            ratio = measured.error / measured.bound if measured.bound else measured.error
            worst[measured.name] = max(worst.get(measured.name, 0.0), ratio)
    return worst


def _described(config: KernelConfig) -> list[str]:
    """One text for each problem; it differs if anything about the problem does."""
    texts = []
    for spec, races in problems(config):
        facts = spec.as_dict(config.mask)
        parts = [
            f"B {len(spec.seq_lens)}, H {spec.num_heads}, Sq {spec.seq_len_q}",
            f"K {', '.join(map(str, spec.seq_lens))}",
            *_mask_words(config.mask, facts),
            f"splits {spec.splits or 'planned'}",
            f"{spec.values} values, seed {spec.seed}",
            f"threshold {spec.scalars.rescale_threshold:g}",
            f"output scale {spec.scalars.output_scale:g}, LSE base {spec.scalars.lse_base}",
            *(["race detector"] if races else []),
        ]
        texts.append(", ".join(parts))
    return texts


def _mask_words(mask: str, facts: Mapping[str, Any]) -> list[str]:
    if mask == "window":
        return [f"window {facts['window_left']}"]
    if mask == "dcp":
        return [
            f"rank {facts['cp_rank']} of {facts['cp_world']}, {facts['cp_interleave']} keys each"
        ]
    return []


@cache
def _judges() -> str:
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _JUDGES for file in _PACKAGE.glob(pattern)}):
        digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()
