"""Small PTX kernels for the emulator's tests, and a way to run one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlakern.emulator import GlobalMemory, LaunchReport, Module, Options
from mlakern.tensormap import TensorMap

REGISTERS = """
    .reg .pred %p<40>;
    .reg .b16 %rs<40>;
    .reg .b32 %r<200>;
    .reg .f32 %f<40>;
    .reg .b64 %rd<80>;
    .reg .f64 %fd<20>;
"""


def kernel(body: str, parameters: Sequence[str] = (), target: str = "sm_100a") -> str:
    """A module with one kernel ``k``; parameters are declarations such as ``.u64 out``."""
    declared = ",\n    ".join(f".param {parameter}" for parameter in parameters)
    return f""".version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(
    {declared}
)
{{
{REGISTERS}
{body}
}}
"""


def pointer(address: int) -> bytes:
    return address.to_bytes(8, "little")


def run(
    body: str,
    arrays: dict[str, np.ndarray[Any, Any]] | None = None,
    *,
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    shared: int = 4096,
    maps: Sequence[TensorMap] = (),
    memory: GlobalMemory | None = None,
    options: Options | None = None,
    observer: Any = None,
    target: str = "sm_100a",
) -> LaunchReport:
    """Run a kernel whose parameters are tensor maps m0, m1, … and one pointer for each array.

    The body finds the pointers in ``%rd1``, ``%rd2``, … in the order of ``arrays``, all writable.
    """
    memory = memory or GlobalMemory()
    arrays = arrays or {}
    names = list(arrays)
    parameters = [f".align 64 .b8 m{n}[128]" for n in range(len(maps))]
    parameters += [f".u64 {name}" for name in names]
    loads = "\n".join(f"ld.param.u64 %rd{n}, [{name}];" for n, name in enumerate(names, 1))
    text = kernel(loads + "\n" + body, parameters, target)
    addresses = [memory.add(name, array, writable=True) for name, array in arrays.items()]
    return Module.from_ptx(text).launch(
        "k",
        (grid, 1, 1),
        (block, 1, 1),
        memory=memory,
        parameters=[*maps, *(pointer(a) for a in addresses)],
        cluster=(cluster, 1, 1),
        dynamic_shared=shared,
        options=options,
        observer=observer,
    )


GLOBAL_INDEX = """
    mov.u32 %r190, %ctaid.x;
    mov.u32 %r191, %ntid.x;
    mov.u32 %r192, %tid.x;
    mad.lo.u32 %r193, %r190, %r191, %r192;
"""
