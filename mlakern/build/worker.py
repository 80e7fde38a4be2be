"""A build worker: a process that compiles configurations one after the other.

The DSL's import is paid once for many configurations. Whatever the compiler prints goes to a log
file; whatever it does to the process happens to this one alone.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from mlakern.build.describe import BuildError, describe
from mlakern.build.key import BuildKey
from mlakern.build.publish import StoreWriter
from mlakern.matrix import BuildItem
from mlakern.sources import source_digest
from mlakern.store import StoreError

LOG_NAME = "log"


@dataclass(frozen=True)
class Job:
    """One configuration to compile and publish under `root`."""

    item: BuildItem
    key: BuildKey
    root: Path


@dataclass(frozen=True)
class Reply:
    """What became of a job: the entry's folder, or why there is none."""

    path: Path | None
    error: str
    seconds: float


def serve(connection: Connection, folder: Path, compiler: str) -> None:
    """Answer jobs until the connection ends.

    folder: this worker's own, for its log and for what a compilation leaves behind. compiler: name
    of the module whose compile_config compiles.
    """
    # Whoever ends this process ends its group, and with it an assembler that hangs.
    os.setpgid(0, 0)
    descriptor = os.open(folder / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        connection.send(_answer(job, folder, compiler))


def _answer(job: Job, folder: Path, compiler: str) -> Reply:
    start = time.monotonic()
    path, error = None, ""
    try:
        path = _build(job, folder, compiler)
    except (BuildError, StoreError) as failure:
        error = str(failure)
    except Exception as failure:
        # The DSL raises what it likes; one configuration's failure is a row in the table.
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    sys.stdout.flush()
    sys.stderr.flush()
    return Reply(path, error, time.monotonic() - start)


def _build(job: Job, folder: Path, compiler: str) -> Path:
    # This process has imported the sources as they are now, not as they were when the key was made.
    if source_digest() != job.key.sources:
        raise BuildError("kernel sources changed during the build; build again")
    with tempfile.TemporaryDirectory(dir=folder) as workdir:
        compiled = importlib.import_module(compiler).compile_config(job.item.config, Path(workdir))
    manifest = describe(job.item.config, compiled, job.key, allow_spills=job.item.allow_spills)
    return StoreWriter(job.root).publish(manifest, compiled.cubin, compiled.ptx)
