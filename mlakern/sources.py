"""The identity of the kernel sources: a stored kernel serves only the sources it was built from."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent
# What decides the bytes of a cubin and the parameters it takes.
_SOURCES = ("kernels/**/*.py", "build/compiler.py", "signature.py", "config.py", "work_list.py")


def source_files(package: Path = _PACKAGE) -> list[Path]:
    """The kernel sources in a package folder, sorted."""
    return sorted({path for pattern in _SOURCES for path in package.glob(pattern)})


@cache
def source_digest(package: Path = _PACKAGE) -> str:
    """SHA-256 over the names and bytes of the kernel sources in a package folder."""
    digest = hashlib.sha256()
    for path in source_files(package):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
