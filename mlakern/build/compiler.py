"""Compiles one configuration: CuTe DSL to PTX, ptxas to a cubin, on any CPU machine.

The DSL is imported inside the functions: the build's other modules and their tests need none.

The cubin is assembled by the ptxas of the nvidia-cuda-nvcc package, of the same version as the one
inside the DSL, in a process of its own. ptxas breaks ties by heap addresses, so inside a long-lived
process, or with address randomisation, equal PTX gives cubins that differ in register names.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlakern.config import KernelConfig

# Passed to the compilers; it changes the code, so it is part of an entry's key.
OPTIMIZATION_LEVEL = 3

_PTXAS_PACKAGE = "nvidia-cuda-nvcc"
_PTXAS_FILE = "nvidia/cu13/bin/ptxas"
_ADDR_NO_RANDOMIZE = 0x0040000  # personality(2)

_log = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """The DSL did not leave what was asked of it, or ptxas refused the PTX."""


@dataclass(frozen=True)
class KernelFacts:
    """One entry of a compiled module and the launch shape that it was compiled for.

    dynamic_shared: bytes of shared memory to ask for at launch.
    """

    role: str
    entry: str
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int


@dataclass(frozen=True)
class Compiled:
    """PTX and cubin of a configuration; both hold the same kernels."""

    ptx: str
    cubin: bytes
    kernels: tuple[KernelFacts, ...]
    options: dict[str, str]


def compile_options(config: KernelConfig) -> dict[str, str]:
    """What the compiler is told, in words: part of the manifest and of the store's key."""
    return {"arch": config.arch, "opt_level": str(OPTIMIZATION_LEVEL)}


def toolchain() -> dict[str, str]:
    """Versions of the packages that make the code."""
    packages = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", _PTXAS_PACKAGE)
    return {name: importlib.metadata.version(name) for name in packages}


def compile_config(config: KernelConfig, workdir: Path) -> Compiled:
    """PTX and cubin of both kernels of `config`.

    workdir: an empty directory of this compilation's own.
    Raises CompileError; errors of the DSL pass through.
    """
    from mlakern.kernels.program import entry_names, program

    ptx = _to_ptx(config, workdir)
    names = entry_names(config)
    _check_entries(ptx, sorted(names.values()))
    kernels = tuple(
        KernelFacts(role, names[role], entry.block, entry.cluster, entry.dynamic_shared)
        for role, entry in program(config).items()
    )
    cubin = assemble(ptx, config.arch, workdir)
    return Compiled(ptx, cubin, kernels, compile_options(config))


def assemble(ptx: str, arch: str, workdir: Path) -> bytes:
    """The cubin of a PTX module. Raises CompileError with what ptxas printed."""
    (workdir / "kernel.ptx").write_text(ptx)
    ptxas = importlib.metadata.distribution(_PTXAS_PACKAGE).locate_file(_PTXAS_FILE)
    # File names and the environment reach ptxas' heap as well: keep them the same everywhere.
    command = [str(ptxas), f"-arch={arch}", f"-O{OPTIMIZATION_LEVEL}", "-o", "kernel.cubin"]
    done = subprocess.run(
        [*command, "kernel.ptx"],
        cwd=workdir,
        env={},
        preexec_fn=_fixed_addresses,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CompileError(f"ptxas failed ({done.returncode}): {done.stderr.strip()}")
    return (workdir / "kernel.cubin").read_bytes()


def _fixed_addresses() -> None:
    """Turns address randomisation off for the program that this process is about to become.

    A sandbox may forbid it; then the cubin is as good, but may differ between two builds.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.personality(_ADDR_NO_RANDOMIZE) == -1:
        _log.warning("address randomisation stays on: builds may differ in register names")


def _to_ptx(config: KernelConfig, workdir: Path) -> str:
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir

    from mlakern.kernels.program import host_function

    compile_with = cute.compile[
        cute.GPUArch(config.arch),
        cute.OptLevel(OPTIMIZATION_LEVEL),
        cute.KeepPTX(True),
        DumpDir(str(workdir)),
    ]
    compile_with(host_function(config), cute.runtime.make_fake_stream())
    return _only(workdir, "*.ptx").read_text()


def _only(workdir: Path, pattern: str) -> Path:
    found = sorted(workdir.glob(pattern))
    if len(found) != 1:
        raise CompileError(f"compiler output {pattern} in {workdir}: got {len(found)}, need 1")
    return found[0]


def _check_entries(ptx: str, expected: list[str]) -> None:
    found = sorted(re.findall(r"\.entry\s+(\w+)", ptx))
    if found != expected:
        raise CompileError(f"entries in the PTX: got {found}, need {expected}")
