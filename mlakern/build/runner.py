"""Builds many configurations in worker processes.

A worker that raises, exits, crashes or takes too long costs the configuration it had; another
worker takes its place and the others go on.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from mlakern import store
from mlakern.build import worker
from mlakern.build.key import BuildKey
from mlakern.build.publish import StoreWriter, is_intact
from mlakern.build.worker import LOG_NAME, Job, Reply
from mlakern.config import KernelConfig
from mlakern.matrix import BuildItem
from mlakern.sources import source_digest

COMPILER = "mlakern.build.compiler"

# Seconds for one configuration, the start of a compiler process included. It takes 2 to 5; a
# loaded machine may need ten times that.
TIMEOUT = 300.0

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
    timeout: float = TIMEOUT,
    progress: Callable[[Outcome], None] | None = None,
    compiler: str = COMPILER,
) -> list[Outcome]:
    """Build the items into the store folder `root`; one outcome each, in the items' order.

    jobs: worker processes, by default the CPUs this process may use. timeout: seconds after which
    a configuration has failed. progress: called with each outcome as it comes. compiler: the module
    with compile_config, compile_options and toolchain.

    Raises importlib.metadata.PackageNotFoundError without the DSL, StoreError if there is something
    to build and `root` cannot be written.
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
    if pending:
        StoreWriter(root).check_writable()
    limit = jobs or len(os.sched_getaffinity(0))
    with _workers(min(limit, len(pending)), compiler, timeout) as workers:
        for outcome in _run(pending, workers):
            finish(outcome)
    return [outcomes[item.config] for item in items]


def _key(config: KernelConfig, compiler: str) -> BuildKey:
    module = importlib.import_module(compiler)
    return BuildKey(config, source_digest(), module.compile_options(config), module.toolchain())


class _Worker:
    """A worker process with its folder and connection; started when there is a job for it.

    folder: the log of the process and all its temporary files.
    """

    def __init__(self, folder: Path, compiler: str, timeout: float) -> None:
        self._folder = folder
        self._compiler = compiler
        self._timeout = timeout
        self._process: SpawnProcess | None = None
        self._began = 0.0
        self._log_start = 0
        self.connection: Connection
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        if self._process is None:
            self._start()
        self.job = job
        self._began = time.monotonic()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        # A process that is dead already shows when its answer is taken.
        with suppress(BrokenPipeError):
            self.connection.send(job)

    @property
    def patience(self) -> float:
        """Seconds that the job in hand may still take."""
        return max(0.0, self._began + self._timeout - time.monotonic())

    def take(self) -> Outcome:
        """The outcome of the job in hand: its answer has come, its process died or it is late."""
        assert self.job is not None
        job, self.job = self.job, None
        if not self.connection.poll():
            self.stop()
            reply = self._failure(f"no result after {self._timeout:g} s; try a longer --timeout")
        else:
            try:
                reply = self.connection.recv()
            except (EOFError, ConnectionResetError):
                reply = self._failure(f"compiler process died: {self._died()}")
        if reply.path is not None:
            return Outcome(job.item.config, "built", reply.path, reply.seconds)
        return Outcome(job.item.config, "failed", None, reply.seconds, reply.error, self._printed())

    def stop(self) -> None:
        """End the process and whatever it started (ptxas)."""
        if self._process is None:
            return
        self.connection.close()
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # It may not have got as far as to lead a group.
        self._process.kill()
        self._process.join()
        self._process = None

    @property
    def _log(self) -> Path:
        return self._folder / LOG_NAME

    def _start(self) -> None:
        # Not fork: the parent may hold threads (the progress bar has one).
        context = multiprocessing.get_context("spawn")
        self.connection, far_end = context.Pipe()
        self._process = context.Process(
            target=worker.serve, args=(far_end, self._folder, self._compiler), daemon=True
        )
        self._process.start()
        far_end.close()

    def _failure(self, error: str) -> Reply:
        return Reply(None, error, time.monotonic() - self._began)

    def _died(self) -> str:
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        self.stop()
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _printed(self) -> str:
        if not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        return _CONTROL_SEQUENCE.sub("", text)[-_LOG_TAIL:]


@contextmanager
def _workers(count: int, compiler: str, timeout: float) -> Iterator[list[_Worker]]:
    with tempfile.TemporaryDirectory(prefix="mlakern-build-") as parent:
        folders = [Path(parent) / str(number) for number in range(count)]
        workers = [_Worker(folder, compiler, timeout) for folder in folders]
        for folder in folders:
            folder.mkdir()
        try:
            yield workers
        finally:
            for each in workers:
                each.stop()


def _run(pending: deque[Job], workers: list[_Worker]) -> Iterator[Outcome]:
    for each in workers:
        each.give(pending.popleft())
    while busy := {each.connection: each for each in workers if each.job is not None}:
        ready = wait(list(busy), min(each.patience for each in busy.values()))
        for connection, each in busy.items():
            if connection in ready or not each.patience:
                yield each.take()
                if pending:
                    each.give(pending.popleft())
