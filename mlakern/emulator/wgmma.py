"""wgmma: matrix products of a warpgroup with operands in shared memory (PTX ISA, "Asynchronous
Warpgroup Level Matrix Instructions").

D[64, n] (+)= A[64, k] · B[k, n]. D lies in registers, warp w of the warpgroup has rows 16 w to
16 w + 15. The product is computed when it is issued; only a race detector sees that it may still
read its operands until wgmma.wait_group. Sums are float32 in the order of the BLAS (8-bit products
accumulate with fewer bits on hardware, which is not modelled), s32 ones exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlakern.emulator import descriptors, fragments, operands
from mlakern.emulator.errors import Fault
from mlakern.emulator.observer import SharedRegion
from mlakern.emulator.operands import Operand
from mlakern.emulator.runtime import ConvergenceWait

if TYPE_CHECKING:
    from mlakern.emulator.descriptors import SharedDescriptor
    from mlakern.emulator.group import Group
    from mlakern.emulator.program import Instruction

Registers: TypeAlias = "Sequence[NDArray[Any]]"

ROWS = 64
WARPGROUP = 128


@dataclass(frozen=True)
class Form:
    """What the text of a wgmma.mma_async says. negative: exactly one of A and B is negated."""

    n: int
    k: int
    a_format: str
    b_format: str
    d_format: str
    a_mn_major: bool
    b_mn_major: bool
    negative: bool
    saturate: bool
    instruction: Instruction

    @cached_property
    def a(self) -> Operand:
        return self._operand(ROWS, self.a_format, self.a_mn_major)

    @cached_property
    def b(self) -> Operand:
        return self._operand(self.n, self.b_format, self.b_mn_major)

    def _operand(self, rows: int, format_: str, mn_major: bool) -> Operand:
        width = fragments.ELEMENT_BITS[format_] // 8
        return Operand(rows, self.k * width, width, mn_major)


def gathered(g: Group) -> bool:
    """Whether the group is a whole warpgroup; otherwise it waits for the others."""
    if g.width == WARPGROUP:
        return True
    if bin(g.bundle.alive).count("1") < WARPGROUP:
        raise Fault("needs four whole warps that form a warpgroup, the first a multiple of 4")
    g.waiting = ConvergenceWait(WARPGROUP - g.width)
    return False


def multiply(g: Group, form: Form, d: Registers | None, a: int | Registers, b: int) -> NDArray[Any]:
    """The registers of D, [registers, 128 lanes]. d: the old ones, or None. a: a descriptor, or
    registers.
    """
    described = descriptors.wgmma_shared(b)
    right = _matrix(g, form.b, described, form.b_format)
    if isinstance(a, int):
        left_described = descriptors.wgmma_shared(a)
        left = _matrix(g, form.a, left_described, form.a_format)
        _observe(g, form, left_described, described)
    else:
        left = fragments.a_matrix(a, 16, form.a_format).reshape(ROWS, form.k)
        _observe(g, form, None, described)
    product: operands.F32 = left @ (-right if form.negative else right).T
    total = product.reshape(4, 16, form.n)
    if d is not None:
        if any(each is None for each in d):
            raise Fault("D is an input, and a register of it was never written")
        total = fragments.accumulators(d, 16, form.d_format) + total
    registers: NDArray[Any] = fragments.registers_of(total, form.d_format, form.saturate)
    return registers


def _matrix(g: Group, operand: Operand, descriptor: SharedDescriptor, format_: str) -> operands.F32:
    """An operand in shared memory as float32 [rows, k]."""
    cta = g.cta.operands
    if (operand, descriptor) not in cta.verified:
        operands.check_readable(operand, descriptor, cta.written)
        cta.verified.add((operand, descriptor))
    values = operands.widen(operands.gather(operand, descriptor, cta.units), format_)
    return values.T if operand.mn_major else values


def _observe(g: Group, form: Form, a: SharedDescriptor | None, b: SharedDescriptor) -> None:
    """Each warp reads its rows of A and all of B."""
    observer = g.cta.launch.observer
    if observer is None:
        return
    shared = [SharedRegion(g.cta.rank, operands.granules(form.b, b))]
    for index, warp in enumerate(g.cluster_warps()):
        regions = shared
        if a is not None:
            regions = [*shared, SharedRegion(g.cta.rank, _rows_of_warp(form.a, a, index))]
        ticket = observer.wgmma(form.instruction, warp, regions)
        g.bundle.wgmma_groups[-1].append((warp, ticket))


def _rows_of_warp(operand: Operand, descriptor: SharedDescriptor, index: int) -> NDArray[np.int64]:
    """Granules of rows 16 index to 16 index + 15 of A."""
    units = operands.places(operand, descriptor)
    if operand.mn_major:
        width = 16 * operand.element_bytes // 16
        units = units[:, index * width : (index + 1) * width]
    else:
        units = units[16 * index : 16 * index + 16]
    return (units.reshape(-1, 1) * 4 + np.arange(4)).reshape(-1)


def commit_group(g: Group) -> None:
    """wgmma.commit_group: close the current group of the warpgroup."""
    g.bundle.wgmma_groups.append([])


def wait_group(g: Group, pending: int) -> None:
    """wgmma.wait_group: all but the latest ``pending`` groups are over."""
    groups = g.bundle.wgmma_groups
    due = groups[: max(len(groups) - 1 - pending, 0)]
    observer = g.cta.launch.observer
    if observer is not None:
        for warp, ticket in (item for group in due for item in group):
            observer.join(warp, ticket)
    g.bundle.wgmma_groups = groups[len(due) :]
