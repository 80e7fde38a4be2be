"""The address map of the machine.

Generic addresses (64 bits) carry their window in the top byte; global memory is window 0. A
shared address of any kind is ``rank << 24 | offset``: a plain shared::cta address is a
shared::cluster address too, so that masking its rank bits reaches a peer, as on hardware. The
system reserves the first 1024 bytes of shared memory; static variables follow, then dynamic
shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlakern.emulator.program import Entry, Symbol, Variable

WINDOW_SHIFT = 56
GLOBAL, SHARED, LOCAL, PARAM = (window << WINDOW_SHIFT for window in range(4))
WINDOW_NAMES = {GLOBAL: "global", SHARED: "shared", LOCAL: "local", PARAM: "param"}

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
RESERVED_SHARED = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """Where an entry's variables lie: shared and local offsets by name, and the bytes they take.

    dynamic: offset at which dynamic shared memory begins.
    """

    shared: dict[str, int]
    dynamic: int
    local: dict[str, int]
    local_bytes: int


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def layout(entry: Entry) -> Layout:
    """Place the shared and local variables of an entry in order of declaration."""
    shared: dict[str, int] = {}
    local: dict[str, int] = {}
    shared_end, local_end = RESERVED_SHARED, 0
    dynamic: list[Variable] = []
    for variable in entry.variables.values():
        if variable.space == "local":
            local_end = align(local_end, variable.align)
            local[variable.name] = local_end
            local_end += variable.size
        elif variable.space == "shared" and variable.size == 0:
            dynamic.append(variable)
        elif variable.space == "shared":
            shared_end = align(shared_end, variable.align)
            shared[variable.name] = shared_end
            shared_end += variable.size
    shared_end = align(shared_end, max((v.align for v in dynamic), default=16))
    shared.update((variable.name, shared_end) for variable in dynamic)
    return Layout(shared, shared_end, local, local_end)


def symbol_code(entry: Entry, places: Layout, symbol: Symbol) -> str:
    """Python code for the address of a variable or parameter, for use where ``g`` is the group."""
    for parameter in entry.parameters:
        if parameter.name == symbol.name:
            return str(PARAM | (parameter.offset + symbol.offset))
    if symbol.name in places.shared:
        return f"g.cta.base + {places.shared[symbol.name] + symbol.offset}"
    if symbol.name in places.local:
        return str(LOCAL | (places.local[symbol.name] + symbol.offset))
    return f"g.cta.launch.symbols[{symbol.name!r}] + {symbol.offset}"
