"""Reads what ptxas wrote into a cubin: parameters, registers, barriers, shared memory, spills.

The facts lie in ELF sections ``.nv.info`` (whole file) and ``.nv.info.<entry>``, lists of records
(format byte, attribute byte, then a value or a length and that many bytes). NVIDIA documents them
only by what ``cuobjdump -elf`` prints; the layouts below were compared with ptxas -v.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from mlakern.cubin import CubinError, multiprocessor_version

_SIZED = 4  # format: 16-bit length, then bytes; the other formats hold 16 bits in place

_REGCOUNT = 0x2F  # (symbol, registers)
_MIN_STACK_SIZE = 0x12  # (symbol, bytes)
_KPARAM_INFO = 0x17  # (0, ordinal | offset << 16, size << 18 | flags)
_REQNTID = 0x10  # (x, y, z)
_NUM_BARRIERS = 0x4C
_ANNOTATIONS = 0x55  # (kind, offset into the code) …
_SPILL = 1

# From sm_90 on the system has the first bytes of a block's shared memory; the section counts them.
_RESERVED_SHARED = 1024

# SASS of sm_90 and later: 16 bytes an instruction, opcode in bits 0 to 11, width of a local
# access in bits 73 to 75 (4: 32 bits, 5: 64, 6: 128; below 4: 8 or 16 bits).
_OPCODE = 0xFFF
_STORE_LOCAL = 0x387
_LOAD_LOCAL = 0x983
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}


@dataclass(frozen=True)
class EntryFacts:
    """What the cubin says of one entry.

    parameters: (offset, size) in bytes, by ordinal. block: required threads, if it requires them.
    registers, stack, spill_stores, spill_loads: in a thread, the latter three in bytes.
    barriers: named barriers; static_shared: bytes in a block, without the reserved ones.
    """

    parameters: tuple[tuple[int, int], ...]
    block: tuple[int, int, int] | None
    registers: int
    barriers: int
    static_shared: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class CubinFacts:
    """What the cubin says of itself. assembler: its ptxas's version, as ptxas writes it."""

    multiprocessor_version: int
    assembler: str
    arch: str
    entries: dict[str, EntryFacts]


def read_cubin(image: bytes) -> CubinFacts:
    """The facts of every entry; CubinError if this is no cubin or a record is not understood."""
    version = multiprocessor_version(image)
    try:
        elf = ELFFile(io.BytesIO(image))
        sections = {section.name: section for section in elf.iter_sections()}
        symbols = [symbol.name for symbol in sections[".symtab"].iter_symbols()]
        registers, stacks = _by_symbol(sections[".nv.info"].data(), symbols)
        prefix = ".nv.info."
        entries = {
            name.removeprefix(prefix): _entry(
                name.removeprefix(prefix), sections, registers, stacks
            )
            for name in sections
            if name.startswith(prefix)
        }
        assembler, arch = _tool_note(sections[".note.nv.tkinfo"].data())
    except (ELFError, KeyError, IndexError, struct.error) as error:
        raise CubinError(f"cubin: not as ptxas writes it: {error!r}") from error
    return CubinFacts(version, assembler, arch, entries)


def _entry(
    name: str, sections: dict[str, Any], registers: dict[str, int], stacks: dict[str, int]
) -> EntryFacts:
    slots: dict[int, tuple[int, int]] = {}
    block = None
    barriers = stores = loads = 0
    code = sections[f".text.{name}"].data()
    for attribute, value in _records(sections[f".nv.info.{name}"].data()):
        if attribute == _KPARAM_INFO:
            place, kind = struct.unpack_from("<4xII", value)
            slots[place & 0xFFFF] = (place >> 16, kind >> 18)
        elif attribute == _REQNTID:
            block = struct.unpack("<3I", value)
        elif attribute == _NUM_BARRIERS:
            barriers = value[0]
        elif attribute == _ANNOTATIONS:
            stores, loads = _spilled_bytes(value, code)
    shared = sections.get(f".nv.shared.{name}")
    return EntryFacts(
        parameters=tuple(slots[ordinal] for ordinal in range(len(slots))),
        block=block,
        registers=registers[name],
        barriers=barriers,
        static_shared=shared["sh_size"] - _RESERVED_SHARED if shared is not None else 0,
        stack=stacks[name],
        spill_stores=stores,
        spill_loads=loads,
    )


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + value]
            at += value
        else:
            yield attribute, struct.pack("<H", value)


def _by_symbol(data: bytes, symbols: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Registers and stack bytes by entry name."""
    tables: dict[int, dict[str, int]] = {_REGCOUNT: {}, _MIN_STACK_SIZE: {}}
    for attribute, value in _records(data):
        if attribute in tables:
            symbol, count = struct.unpack("<II", value)
            tables[attribute][symbols[symbol]] = count
    return tables[_REGCOUNT], tables[_MIN_STACK_SIZE]


def _spilled_bytes(annotations: bytes, code: bytes) -> tuple[int, int]:
    """Bytes that the annotated instructions store to and load from local memory."""
    stored = loaded = 0
    for kind, offset in struct.iter_unpack("<II", annotations):
        if kind != _SPILL:
            continue
        low, high = struct.unpack_from("<QQ", code, offset)
        size = _WIDTHS[high >> 9 & 7]
        if low & _OPCODE == _STORE_LOCAL:
            stored += size
        elif low & _OPCODE == _LOAD_LOCAL:
            loaded += size
        else:
            raise CubinError(
                f"cubin: spill at {offset:#x} has opcode {low & _OPCODE:#x}, "
                f"need {_STORE_LOCAL:#x} or {_LOAD_LOCAL:#x}"
            )
    return stored, loaded


def _tool_note(data: bytes) -> tuple[str, str]:
    """The ptxas version and the -arch it was given, from the strings of the tool note."""
    texts = [text.decode("ascii", "replace") for text in data.split(b"\0") if text]
    versions = [text for text in texts if text.startswith("Cuda compilation tools")]
    arguments = next(text for text in texts if "-arch " in text).split()
    return versions[0].rpartition(" ")[2], arguments[arguments.index("-arch") + 1]
