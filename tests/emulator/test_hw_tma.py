"""Tiled copies against a loop over elements that follows the PTX ISA's description."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlakern.emulator import tensormap_image, tma
from mlakern.emulator.hardware_error import HardwareError
from mlakern.tensormap import Swizzle, TensorMap

BASE = 0x7_0000_0000


class Buffers:
    """Global memory of a few buffers at virtual addresses."""

    def __init__(self, **buffers: tuple[int, np.ndarray]) -> None:
        self.buffers = list(buffers.values())

    def span(self, address: int, size: int, write: bool) -> tuple[np.ndarray, int]:
        for start, data in self.buffers:
            if start <= address and address + size <= start + data.size:
                if write and not data.flags.writeable:
                    raise HardwareError("read-only")
                return data, address - start
        raise HardwareError(f"no buffer at {address:#x}")


def swizzled_by_rows(address: int, span: int) -> int:
    """The PTX ISA's picture: in rows of 128 bytes, 16-byte chunks change places within ``span``."""
    row, chunk, byte = address // 128, address % 128 // 16, address % 16
    chunks = max(span // 16, 1)
    group, within = divmod(chunk, chunks)
    return row * 128 + (group * chunks + (within ^ row % chunks)) * 16 + byte


def naive_box(tensor_map: TensorMap, coordinates: tuple[int, ...], data: np.ndarray) -> dict:
    """Shared offset -> byte, element by element."""
    width = tensor_map.element_bytes
    steps = (width, *tensor_map.strides)
    result = {}
    positions = itertools.product(*(range(n) for n in reversed(tensor_map.box)))
    for order, reversed_position in enumerate(positions):
        at = [c + p for c, p in zip(coordinates, reversed(reversed_position), strict=True)]
        inside = all(0 <= a < n for a, n in zip(at, tensor_map.extents, strict=True))
        source = sum(a * s for a, s in zip(at, steps, strict=True))
        for byte in range(width):
            result[order * width + byte] = int(data[source + byte]) if inside else 0
    return result


@st.composite
def copies(draw: st.DrawFn) -> tuple[TensorMap, tuple[int, ...]]:
    width = draw(st.sampled_from([1, 2, 4]))
    swizzle = draw(st.sampled_from(list(Swizzle)))
    row = swizzle.value or draw(st.sampled_from([16, 48, 64]))
    rank = draw(st.integers(1, 4))
    box = (row // width, *(draw(st.integers(1, 5)) for _ in range(rank - 1)))
    extents = (
        draw(st.integers(1, 2 * row // width)),
        *(draw(st.integers(1, 7)) for _ in range(rank - 1)),
    )
    strides, step = [], -(-extents[0] * width // 16) * 16
    for extent in extents[1:]:
        step += 16 * draw(st.integers(0, 2))
        strides.append(step)
        step *= extent
    coordinates = tuple(draw(st.integers(-b - 1, e + 1)) for b, e in zip(box, extents, strict=True))
    return TensorMap(BASE, width, extents, tuple(strides), box, swizzle), coordinates


def bytes_of(tensor_map: TensorMap) -> np.ndarray:
    steps = (tensor_map.element_bytes, *tensor_map.strides)
    last = sum((e - 1) * s for e, s in zip(tensor_map.extents, steps, strict=True))
    return np.random.default_rng(last).integers(1, 256, last + steps[0], dtype=np.uint8)


@settings(max_examples=150, deadline=None)
@given(copies(), st.integers(1, 12))
def test_load_equals_an_element_loop(case: tuple, slot: int) -> None:
    tensor_map, coordinates = case
    data = bytes_of(tensor_map)
    at = 128 * slot
    shared, written = np.zeros(32768, np.uint8), np.zeros(32768, np.uint8)
    box = tma.read_box(tensor_map, coordinates, Buffers(a=(BASE, data)))
    tma.write_shared(box, tensor_map, shared, written, at)
    for offset, value in naive_box(tensor_map, coordinates, data).items():
        place = swizzled_by_rows(at + offset, tensor_map.swizzle.value)
        assert shared[place] == value
    covered = np.flatnonzero(written)
    assert covered.tolist() == list(range(at, at + tensor_map.box_bytes))
    granules = tma.shared_granules(tensor_map, at)
    assert (granules.start, granules.stop) == (at // 4, (at + tensor_map.box_bytes) // 4)


@settings(max_examples=100, deadline=None)
@given(copies(), st.integers(1, 12))
def test_store_writes_the_inside_and_nothing_else(case: tuple, slot: int) -> None:
    tensor_map, coordinates = case
    data = bytes_of(tensor_map)
    before = data.copy()
    at = 128 * slot
    shared = np.random.default_rng(slot).integers(0, 256, 32768, dtype=np.uint8)
    box = tma.read_shared(tensor_map, shared, np.full(32768, 0xFF, np.uint8), at)
    tma.write_box(tensor_map, coordinates, box, Buffers(a=(BASE, data)))
    expected = before.copy()
    width = tensor_map.element_bytes
    steps = (width, *tensor_map.strides)
    for order, position in enumerate(
        itertools.product(*(range(n) for n in reversed(tensor_map.box)))
    ):
        target = [c + p for c, p in zip(coordinates, reversed(position), strict=True)]
        if all(0 <= a < n for a, n in zip(target, tensor_map.extents, strict=True)):
            to = sum(a * s for a, s in zip(target, steps, strict=True))
            for byte in range(width):
                place = swizzled_by_rows(at + order * width + byte, tensor_map.swizzle.value)
                expected[to + byte] = shared[place]
    np.testing.assert_array_equal(data, expected)


def test_box_over_two_buffers_and_past_four_gigabytes() -> None:
    tensor_map = TensorMap(BASE, 1, (16, 2), (1 << 33,), (16, 2), Swizzle.NONE)
    first, second = (np.full(16, v, np.uint8) for v in (1, 2))
    memory = Buffers(a=(BASE, first), b=(BASE + (1 << 33), second))
    assert tma.read_box(tensor_map, (0, 0), memory).tolist() == [1] * 16 + [2] * 16


def test_missing_memory_faults() -> None:
    tensor_map = TensorMap(BASE, 1, (16, 2), (32,), (16, 2), Swizzle.NONE)
    memory = Buffers(a=(BASE, np.zeros(16, np.uint8)))
    with pytest.raises(HardwareError, match="no buffer at 0x700000020"):
        tma.read_box(tensor_map, (0, 0), memory)
    assert not tma.read_box(tensor_map, (0, 2), memory).any()  # wholly outside: nothing is read


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, _: tma.read_box(m, (0,), Buffers()), "got 1 coordinates, need 2"),
        (lambda m, s: tma.write_shared(np.zeros(1024, np.uint8), m, s, s, 1040), "multiple of 128"),
        (lambda m, s: tma.write_shared(np.zeros(1024, np.uint8), m, s, s, 3968), "passes the end"),
        (lambda m, s: tma.read_shared(m, s, np.zeros(4096, np.uint8), 1024), "byte 0x400 of"),
    ],
)
def test_illegal_copies_fault(make, message: str) -> None:
    tensor_map = TensorMap(BASE, 1, (128, 8), (128,), (128, 8), Swizzle.B128)
    with pytest.raises(HardwareError, match=message):
        make(tensor_map, np.zeros(4096, np.uint8))


def test_short_rows_under_a_swizzle_are_refused() -> None:
    tensor_map = TensorMap(BASE, 1, (64, 8), (64,), (64, 8), Swizzle.B128)
    with pytest.raises(HardwareError, match="row of 64 bytes with swizzle 128B, need 128"):
        tma.write_shared(
            np.zeros(512, np.uint8), tensor_map, np.zeros(4096, np.uint8), np.zeros(4096), 0
        )


@settings(max_examples=100, deadline=None)
@given(copies(), st.integers(0, (1 << 44) - 1), st.integers(0, (1 << 36) - 1))
def test_image_round_trip(case: tuple, address: int, stride: int) -> None:
    tensor_map, _ = case
    strides = tuple(min(stride + i, (1 << 36) - 1) << 4 for i in range(tensor_map.rank - 1))
    wide = TensorMap(
        address << 4,
        tensor_map.element_bytes,
        tensor_map.extents,
        strides,
        tensor_map.box,
        tensor_map.swizzle,
    )
    assert tensormap_image.decode(tensormap_image.encode(wide)) == wide


def test_image_bit_layout_by_hand() -> None:
    """uint8, rank 3, box 128 x 64 x 1, 128-byte swizzle, a stride beyond 36 bits."""
    words = [0] * 32
    words[0], words[1] = 0x89ABCDE0, 0x7F12
    words[2] = 2 << 4 | 0 << 7 | 3 << 13 | 1  # an unknown bit is set as well
    words[3], words[4], words[7] = 576 >> 4, 0x1234, 0x3 << 4
    words[8], words[9], words[10] = 511, 63, (1 << 32) - 1
    image = bytearray(struct.pack("<32I", *words))
    image[55], image[56], image[57] = 127, 63, 0
    assert tensormap_image.decode(bytes(image)) == TensorMap(
        0x7F1289ABCDE0, 1, (512, 64, 1 << 32), (576, 0x3_0000_1234 << 4), (128, 64, 1), Swizzle.B128
    )


@pytest.mark.parametrize(
    ("word2", "message"),
    [(6 << 4, "rank 7"), (13 << 7, "data type 13"), (1 << 19, "atomicity 1"), (0, "inner box row")],
)
def test_bad_images_fault(word2: int, message: str) -> None:
    image = bytearray(128)
    image[8:12] = struct.pack("<I", word2)
    with pytest.raises(HardwareError, match=message):
        tensormap_image.decode(bytes(image))
