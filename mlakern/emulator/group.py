"""A group of lanes that execute together, and how groups part and meet.

A *bundle* is up to four consecutive warps of a CTA (a warpgroup). It starts as one group. Where
its lanes disagree about a branch the group splits; groups of a bundle that reach the same
instruction merge. A group of one lane keeps every register as a Python scalar, which is what
makes an elected thread cheap.

Splitting copies nothing: the parts inherit registers from the group they came from (`Registers`)
and fetch their lanes of one when they first read it. Merging two parts touches only registers
that one of them wrote and that are still live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlakern.emulator.values import UNSIGNED, from_float32, join, kind_of
from mlakern.emulator.writer import Mode

if TYPE_CHECKING:
    from mlakern.emulator.bundle import Bundle
    from mlakern.emulator.codegen import Variant

WARP = 32


class Wait(Protocol):
    """Why a group does not run."""

    def describe(self) -> str:
        """What the group waits for, with the state of the thing that it waits on."""


class Partial:
    """A register that only some lanes have written. ``values`` is an unsigned array."""

    __slots__ = ("defined", "values")

    def __init__(self, values: Any, defined: Any) -> None:
        self.values = values
        self.defined = defined


class Registers(dict[int, Any]):
    """Values by register number; missing ones are the lanes ``index`` of ``parent``'s."""

    __slots__ = ("index", "parent")

    def __init__(self, parent: Registers | None = None, index: Any = None) -> None:
        super().__init__()
        self.parent = parent
        self.index = index

    def __missing__(self, number: int) -> Any:
        if self.parent is None:
            raise KeyError(number)
        value = self[number] = narrow(self.parent[number], self.index)
        return value

    def kind(self, number: int) -> str:
        """The kind of a register, without fetching it; "-" if it was never written."""
        value = self.get(number)
        if value is not None:
            return kind_of(value)
        if self.parent is None:
            return "-"
        kind = self.parent.kind(number)
        if type(self.index) is int:
            kind = {"p": "b", "u": "i", "s": "i", "w": "i"}.get(kind, kind)
            if kind == "f":
                kind = kind_of(self[number])
        return kind


def narrow(value: Any, index: Any) -> Any:
    """The lanes ``index`` (an int or an index array) of a stored register value."""
    kind = kind_of(value)
    if kind in "igb":
        return value
    if kind == "w":
        low, high = narrow(value[0], index), narrow(value[1], index)
        if type(index) is not int:
            return low, high
        return bits_of(low) | bits_of(high) << 32
    if kind == "P":
        return Partial(value.values[np.atleast_1d(index)], value.defined[np.atleast_1d(index)])
    if type(index) is not int:
        return value[index]
    if kind == "p":
        return bool(value[index])
    if kind == "f" and value.itemsize == 4:
        return value[index]
    return int(value.view(UNSIGNED[8 * value.itemsize])[index])


def bits_of(value: Any) -> int:
    return value if type(value) is int else from_float32(value)


def lane_bits(lanes: Any) -> int:
    """A set of lane numbers below 128 as a bit mask."""
    flags = np.zeros(128, np.bool_)
    flags[lanes] = True
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


class Group:
    """Lanes of one bundle at one place in the program.

    lanes: their indices in the bundle, ascending. mask: the same as a bit set. waiting: why the
    group does not run, or None. token: an arrival at a barrier that the group has yet to see
    completed. apart: it was split off to run its instruction alone. origin: the group that it was
    split from. written: registers written since then, as a bit set. kinds: of its registers at the
    moment when it was split itself.
    """

    __slots__ = (
        "apart",
        "bundle",
        "cta",
        "kinds",
        "lanes",
        "mask",
        "mode",
        "origin",
        "registers",
        "timed_out",
        "token",
        "variant",
        "waiting",
        "warps",
        "width",
        "written",
    )

    def __init__(
        self, bundle: Bundle, lanes: Any, registers: Registers, origin: Group | None = None
    ) -> None:
        self.bundle = bundle
        self.origin = origin
        self.cta = bundle.cta
        self.lanes = lanes
        self.mask = mask = lane_bits(lanes)
        self.width = len(lanes)
        self.registers = registers
        self.waiting: Wait | None = None
        self.token: Any = None
        self.apart = False
        self.timed_out = False
        self.written = 0
        self.kinds: dict[int, str] = {}
        self.variant: Variant
        self.warps = tuple(
            bundle.first_warp + w
            for w in range(bundle.warp_count)
            if mask >> (WARP * w) & FULL_WARP
        )
        self.mode = self._mode()

    def _mode(self) -> Mode:
        if self.width == 1:
            return Mode.LANE
        for warp in self.warps:
            shift = WARP * (warp - self.bundle.first_warp)
            alive = self.bundle.alive >> shift & FULL_WARP
            if self.mask >> shift & FULL_WARP != alive:
                return Mode.PARTIAL
        if self.width % WARP:
            return Mode.PARTIAL
        return Mode.WARP if self.width == WARP else Mode.BUNDLE

    @property
    def mergeable(self) -> bool:
        """Whether the group may become one with others at the same instruction."""
        return self.token is None and not self.apart

    def special(self, name: str) -> Any:
        """A special register that differs between lanes: an array, or an int for one lane."""
        values = self.bundle.special(name)
        if self.width == 1:
            return int(values[self.lanes[0]])
        return values if self.width == self.bundle.size else values[self.lanes]

    def clock(self, width: int) -> int:
        return self.cta.cluster.tick() & ((1 << width) - 1)

    def lane_warps(self) -> Any:
        """The warp (numbered in the cluster) of each lane; an int for one lane or one warp."""
        base = self.cta.rank * self.cta.launch.warps
        if len(self.warps) == 1:
            return base + self.warps[0]
        return base + self.bundle.first_warp + self.lanes // WARP

    def cluster_warps(self) -> list[int]:
        """The warps of the group, numbered in the cluster."""
        base = self.cta.rank * self.cta.launch.warps
        return [base + warp for warp in self.warps]

    def name_of(self, lane: int | None) -> str:
        """The CTA, warps and lane for messages."""
        index = "x".join(map(str, self.cta.index))
        where = f"CTA {index} (rank {self.cta.rank})"
        if lane is not None and lane < self.width:
            thread = int(self.lanes[lane])
            return f"{where} warp {self.bundle.first_warp + thread // WARP} lane {thread % WARP}"
        if self.width == 1:
            return self.name_of(0)
        warps = ", ".join(map(str, self.warps))
        part = "" if self.mode in (Mode.WARP, Mode.BUNDLE) else f" ({self.width} lanes)"
        return f"{where} warp{'s' if len(self.warps) > 1 else ''} {warps}{part}"


FULL_WARP = (1 << WARP) - 1


def split(group: Group, choices: Any) -> list[tuple[int, Group]]:
    """Part a group by an array of values: (value, the lanes that have it), by ascending value."""
    parts = []
    found = (False, True) if choices.dtype == np.bool_ else np.unique(choices).tolist()
    for choice in found:
        index = np.flatnonzero(choices == choice)
        inherited = Registers(group.registers, int(index[0]) if len(index) == 1 else index)
        parts.append((int(choice), Group(group.bundle, group.lanes[index], inherited, group)))
    return parts


def scalarise(group: Group, kinds: dict[int, str]) -> None:
    """Turn registers that are equal in all lanes of a new warp group into scalars.

    What differs between the warps of a bundle is often the same within each of them. Updates kinds.
    """
    registers = group.registers
    for number, kind in kinds.items():
        if kind in "usfp":
            value = registers[number]
            raw = value.view(UNSIGNED[8 * value.itemsize])
            if (raw == raw[0]).all():
                registers[number] = value = narrow(value, 0)
                kinds[number] = kind_of(value)


def narrowed_kind(kind: str, width: int, mode: Mode) -> str:
    """The kind of a register of ``width`` bits in a part of the group where it has ``kind``."""
    if mode is not Mode.LANE or kind in "igbP-":
        return kind
    if kind == "f" and width == 32:
        return "g"
    return "b" if kind == "p" else "i"


def merge(first: Group, second: Group, live: tuple[int, ...]) -> tuple[Group, dict[int, str]]:
    """One group from two that stand at the same instruction, where ``live`` registers matter.

    Also returns the kinds of the live registers.
    """
    bundle, origin = first.bundle, first.origin
    a, b = first.registers, second.registers
    lanes = np.concatenate((first.lanes, second.lanes))
    order = np.argsort(lanes)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    at = place[: first.width], place[first.width :]
    written = first.written | second.written
    kinds: dict[int, str] = {}
    changed = live
    if origin is None or second.origin is not origin:
        origin, result = None, Group(bundle, lanes[order], Registers())
    elif first.mask | second.mask == origin.mask:
        result = origin
        result.waiting = None
        kinds, changed = origin.kinds, tuple(n for n in live if written >> n & 1)
    else:
        index = np.concatenate((np.atleast_1d(a.index), np.atleast_1d(b.index)))[order]
        inherited = Registers(origin.registers, index)
        result = Group(bundle, lanes[order], inherited, origin)
        kinds, changed = origin.kinds, tuple(n for n in live if written >> n & 1)
    kinds = {number: kinds.get(number, "-") for number in live}
    for number in changed:
        value = _combine(a, b, number, at, bundle.widths[number])
        if value is None:
            result.registers.pop(number, None)
            kinds[number] = "-"
        else:
            result.registers[number] = value
            kinds[number] = kind_of(value)
    result.written |= written
    return result, kinds


def _combine(a: Registers, b: Registers, number: int, at: tuple[Any, Any], width: int) -> Any:
    """One register of a merged group; None where neither part has written it."""
    kinds = a.kind(number), b.kind(number)
    if kinds == ("-", "-"):
        return None
    if kinds[0] == kinds[1] and kinds[0] in "igb":
        value = a[number]
        if value == b[number] and kinds[0] != "g":
            return value
    size = len(at[0]) + len(at[1])
    out = np.zeros(size, np.bool_ if width == 1 else UNSIGNED[max(width, 8)])
    defined = np.ones(size, np.bool_)
    for registers, kind, place in zip((a, b), kinds, at, strict=True):
        if kind == "-":
            defined[place] = False
            continue
        value = registers[number]
        if kind == "g":
            value = from_float32(value)
        elif kind == "w":
            value = join(value[0].view(np.uint32), value[1].view(np.uint32))
        elif kind == "P":
            defined[place] = value.defined
            value = value.values
        elif kind in "sf":
            value = value.view(out.dtype)
        out[place] = value
    return out if defined.all() else Partial(out, defined)
