"""Builds many configurations in worker processes.

A worker that raises, exits or crashes costs the configuration it had; another worker takes its
place and the others go on.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from mlakern import store
from mlakern.build import worker
from mlakern.build.key import BuildKey
from mlakern.build.publish import is_intact
from mlakern.build.worker import Job, Reply
from mlakern.config import KernelConfig
from mlakern.matrix import BuildItem
from mlakern.sources import source_digest

COMPILER = "mlakern.build.compiler"

# Of what a failed job printed, this much of the end is kept.
_LOG_TAIL = 4000
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Outcome:
    """What became of one configuration.

    status: "built", "present" (an intact entry was there) or "failed". error: one message; log:
    the end of what the compiler printed; both empty unless it failed.
    """

    config: KernelConfig
    status: str
    path: Path | None
    seconds: float
    error: str = ""
    log: str = ""


def build(
    items: Sequence[BuildItem],
    root: Path,
    *,
    jobs: int | None = None,
    progress: Callable[[Outcome], None] | None = None,
    compiler: str = COMPILER,
) -> list[Outcome]:
    """Build the items into the store folder `root`; one outcome each, in the items' order.

    jobs: worker processes, by default the CPUs this process may use. progress: called with each
    outcome as it comes. compiler: the module with compile_config, compile_options and toolchain.

    Raises importlib.metadata.PackageNotFoundError without the DSL.
    """
    outcomes: dict[KernelConfig, Outcome] = {}

    def finish(outcome: Outcome) -> None:
        outcomes[outcome.config] = outcome
        if progress is not None:
            progress(outcome)

    pending: deque[Job] = deque()
    for item in items:
        key = _key(item.config, compiler)
        path = root / store.directory_name(item.config, key.digest)
        if is_intact(path):
            finish(Outcome(item.config, "present", path, 0.0))
        else:
            pending.append(Job(item, key, root))
    limit = jobs or len(os.sched_getaffinity(0))
    with _workers(min(limit, len(pending)), compiler) as workers:
        for outcome in _run(pending, workers):
            finish(outcome)
    return [outcomes[item.config] for item in items]


def _key(config: KernelConfig, compiler: str) -> BuildKey:
    module = importlib.import_module(compiler)
    return BuildKey(config, source_digest(), module.compile_options(config), module.toolchain())


class _Worker:
    """One worker process, its connection and its log; replaced by `restart` when it died."""

    def __init__(self, log: Path, compiler: str) -> None:
        self._log = log
        self._compiler = compiler
        self.job: Job | None = None
        self._log_start = 0
        self._start()

    def _start(self) -> None:
        # Not fork: the parent may hold threads (the progress bar has one).
        context = multiprocessing.get_context("spawn")
        self.connection, far_end = context.Pipe()
        self._process = context.Process(
            target=worker.serve, args=(far_end, self._log, self._compiler), daemon=True
        )
        self._process.start()
        far_end.close()

    def give(self, job: Job) -> None:
        self.job = job
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self.connection.send(job)

    def take(self) -> Outcome:
        """The outcome of the job in hand, once the connection has something to say."""
        assert self.job is not None
        job, self.job = self.job, None
        try:
            reply: Reply = self.connection.recv()
        except (EOFError, ConnectionResetError):
            reply = Reply(None, f"compiler process died: {self._died()}", 0.0)
            self._start()
        if reply.path is not None:
            return Outcome(job.item.config, "built", reply.path, reply.seconds)
        return Outcome(job.item.config, "failed", None, reply.seconds, reply.error, self._printed())

    def stop(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()

    def _died(self) -> str:
        self.connection.close()
        self._process.join()
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _printed(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        return _CONTROL_SEQUENCE.sub("", text)[-_LOG_TAIL:]


@contextmanager
def _workers(count: int, compiler: str) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="mlakern-logs-") as logs:
        try:
            for number in range(count):
                workers.append(_Worker(Path(logs) / f"{number}.log", compiler))
            yield workers
        finally:
            for each in workers:
                each.stop()


def _run(pending: deque[Job], workers: list[_Worker]) -> Iterator[Outcome]:
    for each in workers:
        each.give(pending.popleft())
    while busy := {each.connection: each for each in workers if each.job is not None}:
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            each = busy[ready]
            yield each.take()
            if pending:
                each.give(pending.popleft())
