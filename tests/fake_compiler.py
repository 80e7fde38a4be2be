"""A compiler for tests of the build: instant, and it fails in every way on demand.

What it returns was compiled before and lies pickled in the file $FAKE_COMPILED. $FAKE_BEHAVIOUR
(exit, segfault, raise, print, hang) says what happens to configurations with pages of 32 keys.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlakern.build.compiler import Compiled
from mlakern.config import KernelConfig

VARIABLE = "FAKE_COMPILED"


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """What `condition` returns once it is true, or its last answer."""
    end = time.monotonic() + seconds
    while not (answer := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return answer


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that waits for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def compile_options(config: KernelConfig) -> dict[str, str]:
    return {"arch": config.arch}


def toolchain() -> dict[str, str]:
    return {"fake": "1"}


def compile_config(config: KernelConfig, workdir: Path) -> Compiled:
    assert list(workdir.iterdir()) == []
    (workdir / "dump").write_text(config.name)
    behaviour = os.environ.get("FAKE_BEHAVIOUR")
    if config.page_size == 32 and behaviour:
        print(f"compiling {config.name}", flush=True)
        os.write(2, b"\x1b[31mlast words\x1b[0m\n")
        if behaviour == "exit":
            os._exit(7)
        if behaviour == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "raise":
            raise RuntimeError("refused by the fake")
        if behaviour == "hang":
            child = subprocess.Popen(["sleep", "600"])
            Path(os.environ["FAKE_CHILD"]).write_text(f"{os.getpid()} {child.pid}")
            child.wait()
        print("no newline at the end", end="", file=sys.stderr)
    compiled: Compiled = pickle.loads(Path(os.environ[VARIABLE]).read_bytes())
    return compiled
