"""Tensor memory: allocation rules and the register layouts of tcgen05.ld and tcgen05.st."""

from __future__ import annotations

import numpy as np
import pytest

from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.tmem import Shape, TensorMemory, reduce_columns

ALL = (0, 1, 2, 3)


def numbered(columns: int = 512) -> TensorMemory:
    """Every cell holds lane · 1000 + column."""
    tensor = TensorMemory(columns)
    tensor.allocate(columns, exclusive=columns > 512)
    lane, column = np.arange(128)[None, :], np.arange(columns)[:, None]
    tensor.words[:] = lane * 1000 + column
    tensor.written[:] = True
    return tensor


@pytest.mark.parametrize("quadrants", [ALL, (2,), (1, 2), (0, 3)])
def test_32x32b_is_one_lane_a_thread(quadrants: tuple[int, ...]) -> None:
    words = numbered().load(Shape("32x32b", 8), 40, quadrants)
    assert words.shape == (8, 32 * len(quadrants))
    for index, quadrant in enumerate(quadrants):
        for thread in range(32):
            expected = [(quadrant * 32 + thread) * 1000 + 40 + j for j in range(8)]
            assert words[:, index * 32 + thread].tolist() == expected


# Register and thread of the PTX ISA's matrix fragments, walked from the cells: for each row of the
# fragment (lane), the threads left to right, and the registers they hold.
def fragment_16x64b(lane: int, column: int) -> tuple[int, int]:
    """CUTLASS: thread bits (lane + 8, column, lane 0 to 7) of a 16 x 64-bit fragment."""
    repeat, within = divmod(column, 2)
    return repeat, (lane >> 3) | within << 1 | (lane & 7) << 2


def fragment_16x128b(lane: int, column: int) -> tuple[int, int]:
    """Four threads a row, 32 bits each; rows 8 to 15 in the second register."""
    repeat, within = divmod(column, 4)
    return 2 * repeat + (lane >= 8), 4 * (lane % 8) + within


def fragment_16x256b(lane: int, column: int) -> tuple[int, int]:
    """Four threads a row, 64 bits each (two registers); rows 8 to 15 in the second pair."""
    repeat, within = divmod(column, 8)
    return 4 * repeat + 2 * (lane >= 8) + within % 2, 4 * (lane % 8) + within // 2


@pytest.mark.parametrize(
    ("name", "columns", "fragment"),
    [
        ("16x64b", 2, fragment_16x64b),
        ("16x128b", 4, fragment_16x128b),
        ("16x256b", 8, fragment_16x256b),
    ],
)
@pytest.mark.parametrize("repeat", [1, 4])
@pytest.mark.parametrize("half", [0, 16])
def test_sixteen_lane_shapes(name, columns, fragment, repeat: int, half: int) -> None:
    quadrants = (1, 3)
    words = numbered().load(Shape(name, repeat), half << 16 | 64, quadrants)
    for index, quadrant in enumerate(quadrants):
        for lane in range(16):
            for column in range(columns * repeat):
                register, thread = fragment(lane, column)
                expected = (quadrant * 32 + half + lane) * 1000 + 64 + column
                assert words[register, index * 32 + thread] == expected
    assert words.size == 2 * 16 * columns * repeat


@pytest.mark.parametrize("name", ["32x32b", "16x64b", "16x128b", "16x256b"])
def test_store_is_the_inverse_of_load(name: str) -> None:
    tensor = TensorMemory()
    tensor.allocate(64)
    shape = Shape(name, 2)
    values = np.random.default_rng(0).integers(0, 1 << 32, (shape.registers, 64), dtype=np.uint32)
    tensor.store(shape, 16, (2, 3), values)
    assert tensor.load(shape, 16, (2, 3)).tolist() == values.tolist()
    assert tensor.written.sum() == values.size
    touched = np.zeros(128, bool)
    touched[tensor.lanes(shape, 16, (2, 3))] = True
    assert (touched == tensor.written.any(axis=0)).all()
    assert np.flatnonzero(tensor.written.any(axis=1)).tolist() == list(
        range(16, 16 + shape.columns)
    )


def test_loads_of_never_written_cells_name_register_and_thread() -> None:
    tensor = numbered()
    tensor.written[43, 70] = False
    with pytest.raises(HardwareError, match="register 3 of thread 6, quadrant 2"):
        tensor.load(Shape("32x32b", 8), 40, ALL)
    assert tensor.load(Shape("32x32b", 8), 40, (0, 1)).shape == (8, 64)


@pytest.mark.parametrize(
    ("shape", "address", "quadrants", "message"),
    [
        (Shape("32x32b", 1), 32 << 16, (2,), "lane 32 is not in the quadrant of warp 2"),
        (Shape("32x32b", 1), 16 << 16, ALL, "need a multiple of 32"),
        (Shape("16x64b", 1), 8 << 16, ALL, "need a multiple of 16"),
        (Shape("32x32b", 4), 509, ALL, r"columns \[509, 513\) are not allocated, only \[0, 512\)"),
    ],
)
def test_illegal_accesses(shape, address: int, quadrants, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        numbered().load(shape, address, quadrants)


def test_own_quadrant_lane_is_accepted() -> None:
    assert numbered().load(Shape("32x32b", 1), 64 << 16 | 5, (2,))[0, 3] == 67_005


@pytest.mark.parametrize(("name", "repeat"), [("32x32b", 3), ("16x256b", 64), ("16x32bx2", 1)])
def test_illegal_shapes(name: str, repeat: int) -> None:
    with pytest.raises(HardwareError, match=f"shape .{name}"):
        Shape(name, repeat)


def test_allocation_is_first_fit_and_waits_for_room() -> None:
    tensor = TensorMemory()
    assert [tensor.allocate(n) for n in (128, 256, 32)] == [0, 128, 384]
    assert tensor.allocate(128) is None
    tensor.deallocate(0, 128)
    assert tensor.allocate(64) == 0
    assert tensor.allocate(32) == 64
    tensor.check_allocated(64, 32)
    with pytest.raises(HardwareError, match=r"\[64, 97\) are not allocated"):
        tensor.check_allocated(64, 33)
    with pytest.raises(HardwareError, match=r"\[100, 101\) are not allocated"):
        tensor.check_allocated(100, 1)


def test_allocation_forgets_old_contents() -> None:
    tensor = numbered()
    tensor.deallocate(0, 512)
    tensor.allocate(512)
    assert not tensor.written.any()


@pytest.mark.parametrize("columns", [0, 16, 48, 96, 1024])
def test_columns_are_a_power_of_two(columns: int) -> None:
    with pytest.raises(HardwareError, match=f"got {columns} columns, need a power of two"):
        TensorMemory().allocate(columns)


def test_exclusive_allocation() -> None:
    tensor = TensorMemory(576)
    assert tensor.allocate(576, exclusive=True) == 0
    assert tensor.allocate(32) is None
    with pytest.raises(HardwareError, match="this CTA has 512"):
        TensorMemory().allocate(576, exclusive=True)
    with pytest.raises(HardwareError, match="multiple of 32"):
        TensorMemory(576).allocate(560, exclusive=True)


def test_deallocation_must_match() -> None:
    tensor = TensorMemory()
    tensor.allocate(64)
    with pytest.raises(HardwareError, match="32 columns at 0x0, allocated: 64 at 0x0"):
        tensor.deallocate(0, 32)
    tensor.deallocate(0, 64)
    with pytest.raises(HardwareError, match="allocated: none"):
        tensor.deallocate(0, 64)
    with pytest.raises(HardwareError, match="not allocated, only none"):
        tensor.load(Shape("32x32b", 1), 0, ALL)


def test_no_allocation_after_relinquish() -> None:
    tensor = TensorMemory()
    tensor.allocate(32)
    tensor.relinquish()
    with pytest.raises(HardwareError, match=r"after tcgen05\.relinquish"):
        tensor.allocate(32)


def test_reductions_of_a_load() -> None:
    floats = np.float32([[1, -5, np.nan, np.nan], [-3, 2, 4, np.nan]])
    words = floats.view(np.uint32)
    assert reduce_columns(words, "max", "f32", False, False).view(np.float32).tolist()[:3] == [
        1,
        2,
        4,
    ]
    assert reduce_columns(words, "min", "f32", True, False).view(np.float32).tolist()[:3] == [
        1,
        2,
        4,
    ]
    assert reduce_columns(words, "max", "f32", False, True).tolist()[2:] == [0x7FFFFFFF] * 2
    assert reduce_columns(words, "max", "f32", False, False).tolist()[3] == 0x7FFFFFFF
    integers = np.uint32([[1, 0xFFFFFFFF], [2, 3]])
    assert reduce_columns(integers, "max", "u32", False, False).tolist() == [2, 0xFFFFFFFF]
    assert reduce_columns(integers, "max", "s32", False, False).tolist() == [2, 3]
    with pytest.raises(HardwareError, match=r"need .f32, got .u32"):
        reduce_columns(integers, "max", "u32", True, False)
