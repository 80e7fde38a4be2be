"""Checks for tests of a sweep: instant, logged, and they hang or die on demand.

$FAKE_CHECK_LOG is a file that gets the name of each kernel that is checked. Kernels with pages of
128 keys hang if $FAKE_CHECK is "hang", end their process if it is "die", fail if it is "fail".
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from mlakern.store import read_entry
from mlakern.validation.sweep import Finding, identity, statement


def run(path: Path, origin: str) -> Finding:
    entry = read_entry(path, origin)
    config = entry.manifest.config
    with Path(os.environ["FAKE_CHECK_LOG"]).open("a") as log:
        log.write(config.name + "\n")
    behaviour = os.environ.get("FAKE_CHECK") if config.page_size == 128 else None
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "die":
        os._exit(3)
    failed = behaviour == "fail"
    return Finding(
        name=config.name,
        cubin_sha256=entry.manifest.cubin.sha256,
        identity=identity(entry),
        status="fail" if failed else "pass",
        statement=statement(config),
        worst={"lse_vs_exact": 2.0 if failed else 0.25, "kernel_vs_exact_out_bf16": 0.5},
        seconds=1.0,
        reason="lse_vs_exact 0.004 > 0.002" if failed else "",
    )
