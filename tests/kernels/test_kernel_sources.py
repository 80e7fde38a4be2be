"""Kernels of the same source differ only where their configurations say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mlakern.config import KernelConfig
from mlakern.signature import signatures
from mlakern.store import Entry

BASE = KernelConfig(page_size=64, mask="causal")
# What no configuration touches: products, exponentials, barriers, register budgets.
SHARED = (
    "tcgen05",
    "ex2",
    "fma.rn.f32x2",
    "mbarrier.init",
    "setmaxnreg",
    "griddepcontrol",
    "elect",
)
CHANGES: dict[str, dict[str, Any]] = {
    "pages are other boxes": {"page_size": 32},
    "packed rows are other coordinates": {"pack_q": True},
    "a mask is another bound": {"mask": "plain"},
    "an output type is another store": {"out_dtype": "float8_e4m3fn"},
    "a partial type is another store": {"partial_dtype": "float16"},
    "a window is one more bound": {"mask": "window"},
}


def opcodes(ptx: str) -> Counter[str]:
    instruction = re.compile(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.:]*)", re.MULTILINE)
    return Counter(instruction.findall(ptx))


def shared_part(entry: Entry) -> Counter[str]:
    counts = opcodes(entry.load_ptx())
    return Counter({name: n for name, n in counts.items() if name.startswith(SHARED)})


@pytest.mark.parametrize("change", CHANGES)
def test_the_rest_of_the_kernels_is_the_same(
    find_kernel: Callable[[KernelConfig], Entry], change: str
) -> None:
    base, other = find_kernel(BASE), find_kernel(BASE.with_axes(**CHANGES[change]))
    assert base.load_ptx() != other.load_ptx()
    assert shared_part(base)["tcgen05.mma.cta_group::2.kind::f8f6f4.collector::a::fill"] == 4
    assert shared_part(other) == shared_part(base)
    shapes = [
        [(k.role, k.block, k.cluster, k.dynamic_shared, k.spill_stores) for k in m.kernels]
        for m in (base.manifest, other.manifest)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_are_those_of_the_signature(
    find_kernel: Callable[[KernelConfig], Entry], change: str
) -> None:
    config = BASE.with_axes(**CHANGES[change])
    for kernel in find_kernel(config).manifest.kernels:
        expected = [(p.name, p.kind.label, p.kind.size) for p in signatures(config)[kernel.role]]
        assert [(p.name, p.kind, p.size) for p in kernel.parameters] == expected
