"""MMAs against numpy float64; operands are placed byte by byte from the PTX ISA's pictures."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from mlakern.emulator import descriptors, tensorcore
from mlakern.emulator.hardware_error import HardwareError
from mlakern.emulator.tensorcore import Mma, MmaCta
from mlakern.emulator.tmem import TensorMemory

SHARED = 96 * 1024
TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
}
CODES = {
    "e4m3": ("f8f6f4", 0),
    "e5m2": ("f8f6f4", 1),
    "f16": ("f16", 0),
    "bf16": ("f16", 1),
    "tf32": ("tf32", 2),
}
SWIZZLE_CODE = {0: 0, 128: 2, 64: 4, 32: 6}


def swizzled(address: int, span: int) -> int:
    """16-byte chunk c of 128-byte row R moves to chunk c ^ (R mod span/16) of its span."""
    if not span:
        return address
    row, chunk = address // 128, address % 128 // 16
    chunks = span // 16
    chunk = chunk // chunks * chunks + (chunk % chunks ^ row % chunks)
    return row * 128 + chunk * 16 + address % 16


def shared_descriptor(start: int, leading: int, stride: int, span: int) -> int:
    assert start % 16 == 0
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE_CODE[span] << 61


def instruction_word(
    m: int, n: int, a: str, b: str, a_mn: bool = False, b_mn: bool = False, negate: int = 0
) -> int:
    return (
        1 << 4
        | CODES[a][1] << 7
        | CODES[b][1] << 10
        | negate << 13
        | a_mn << 15
        | b_mn << 16
        | n // 8 << 17
        | m // 16 << 24
    )


def place(cta: MmaCta, matrix: np.ndarray, start: int, span: int, mn_major: bool) -> int:
    """Lay [rows, k] out from ``start`` in tiles that touch each other; return its descriptor."""
    rows, depth = matrix.shape
    width = matrix.dtype.itemsize
    row_bytes = (rows if mn_major else depth) * width
    if mn_major and span:
        leading, stride = depth * span, 8 * span  # next span along M or N; next 8 k
    elif span:
        leading, stride = 16, 8 * span
    elif mn_major:
        stride, leading = depth * 16, 128
    else:
        leading, stride = rows * 16, 128
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, depth, width)
    for row, k, byte in itertools.product(range(rows), range(depth), range(width)):
        outer, inner = (k, row * width + byte) if mn_major else (row, k * width + byte)
        assert inner < row_bytes
        if span:
            tile, within = divmod(inner, span)
            offset = tile * leading + outer // 8 * stride + outer % 8 * span + within
        elif mn_major:
            offset = inner // 16 * stride + outer // 8 * leading + outer % 8 * 16 + inner % 16
        else:
            offset = inner // 16 * leading + outer // 8 * stride + outer % 8 * 16 + inner % 16
        at = swizzled(start + offset, span)
        cta.units.view(np.uint8)[at] = raw[row, k, byte]
        cta.written[at] = 0xFF
    return shared_descriptor(start, leading, stride, span)


def new_cta() -> MmaCta:
    tensor = TensorMemory()
    tensor.allocate(512)
    return MmaCta(np.zeros(SHARED, np.uint8), np.zeros(SHARED, np.uint8), tensor)


def random_matrix(shape: tuple[int, int], name: str, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape)
    if name == "tf32":  # a few mantissa bits, so that truncation changes nothing
        return np.round(values * 64).astype(np.float32) / np.float32(64)
    return values.astype(TYPES[name])


def d_cell(layout: str, row: int, column: int, n: int) -> tuple[int, int]:
    """(lane, column) of D: the PTX ISA's data path layouts, by letter."""
    if layout in "AD":
        return row, column
    if layout in "BE":
        return (row, column) if column < n // 2 else (row + 64, column - n // 2)
    if layout == "F":
        return row // 16 * 32 + row % 16, column
    quarter = n // 4  # layout G
    return row + 32 * (column // quarter), column % quarter


def read_d(tensor: TensorMemory, layout: str, rows: int, n: int, at: int) -> np.ndarray:
    result = np.empty((rows, n), np.float32)
    floats = tensor.words.view(np.float32)
    for row, column in itertools.product(range(rows), range(n)):
        lane, place_ = d_cell(layout, row, column, n)
        assert tensor.written[at + place_, lane]
        result[row, column] = floats[at + place_, lane]
    return result


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64).T


CASES = [
    # m, n, ctas, ws, layout
    (128, 64, 1, False, "D"),
    (64, 24, 1, False, "F"),
    (128, 96, 2, False, "B"),
    (256, 64, 2, False, "A"),
    (64, 64, 1, True, "E"),
    (32, 64, 1, True, "G"),
    (128, 64, 1, True, "D"),
]


@pytest.mark.parametrize(("m", "n", "ctas", "ws", "layout"), CASES)
@pytest.mark.parametrize("name", ["e4m3", "bf16"])
def test_product_and_accumulation_in_every_d_layout(m, n, ctas, ws, layout, name) -> None:
    kind, _ = CODES[name]
    instruction = descriptors.instruction(instruction_word(m, n, name, name), kind, ctas, ws)
    depth = instruction.k
    a, b = random_matrix((m, depth), name, 1), random_matrix((n, depth), name, 2)
    group = [new_cta() for _ in range(ctas)]
    rows, columns = m // ctas, n // ctas
    for index, cta in enumerate(group):
        a_word = place(cta, a[index * rows : (index + 1) * rows], 1024, 32, False)
        b_word = place(cta, b[index * columns : (index + 1) * columns], 16384, 32, False)
    a_desc, b_desc = descriptors.tcgen05_shared(a_word), descriptors.tcgen05_shared(b_word)
    mma = Mma(instruction, a_desc, b_desc, 96, False, ctas, ws)
    tensorcore.execute(mma, group)
    got = np.concatenate([read_d(cta.tensor, layout, rows, n, 96) for cta in group])
    np.testing.assert_allclose(got, exact(a, b), rtol=2e-6, atol=2e-5)
    for cta in group:  # nothing else was touched
        assert cta.tensor.written.sum() == rows * n
    again = Mma(instruction, a_desc, b_desc, 96, True, ctas, ws)
    tensorcore.execute(again, group)
    got = np.concatenate([read_d(cta.tensor, layout, rows, n, 96) for cta in group])
    np.testing.assert_allclose(got, 2 * exact(a, b), rtol=2e-6, atol=4e-5)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("majors", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "f16", "tf32"])
def test_operand_layouts(name: str, majors: tuple[bool, bool], span: int) -> None:
    m, n = 64, 128
    word = instruction_word(m, n, name, name, *majors)
    instruction = descriptors.instruction(word, CODES[name][0], 1, False)
    a = random_matrix((m, instruction.k), name, 3)
    b = random_matrix((n, instruction.k), name, 4)
    cta = new_cta()
    mma = Mma(
        instruction,
        descriptors.tcgen05_shared(place(cta, a, 2048, span, majors[0])),
        descriptors.tcgen05_shared(place(cta, b, 32768, span, majors[1])),
        d=0,
        accumulate=False,
    )
    tensorcore.execute(mma, [cta])
    got = read_d(cta.tensor, "F", m, n, 0)
    np.testing.assert_allclose(got, exact(a, b), rtol=2e-6, atol=2e-5)


def test_steps_along_k_move_the_start_inside_the_swizzle() -> None:
    """Rows of 128 bytes, four MMAs whose starts lie 32 bytes apart: one product over K = 128."""
    instruction = descriptors.instruction(
        instruction_word(128, 32, "e4m3", "e5m2"), "f8f6f4", 1, False
    )
    a, b = random_matrix((128, 128), "e4m3", 5), random_matrix((32, 128), "e5m2", 6)
    cta = new_cta()
    a_word, b_word = place(cta, a, 1024, 128, False), place(cta, b, 65536, 128, False)
    for step in range(4):
        mma = Mma(
            instruction,
            descriptors.tcgen05_shared(a_word + 2 * step),
            descriptors.tcgen05_shared(b_word + 2 * step),
            d=0,
            accumulate=step > 0,
        )
        tensorcore.execute(mma, [cta])
    got = read_d(cta.tensor, "D", 128, 32, 0)
    np.testing.assert_allclose(got, exact(a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["e4m3", "f16", "tf32"])
@pytest.mark.parametrize("negate", [0, 1, 2, 3])
def test_a_in_tensor_memory_and_negation(name: str, negate: int) -> None:
    word = instruction_word(128, 16, name, name, negate=negate)
    instruction = descriptors.instruction(word, CODES[name][0], 1, False)
    a = random_matrix((128, instruction.k), name, 7)
    b = random_matrix((16, instruction.k), name, 8)
    cta = new_cta()
    packed = np.ascontiguousarray(a).view(np.uint32)  # [lane, column]
    for lane in range(128):
        for column in range(8):
            cta.tensor.words[200 + column, lane] = packed[lane, column]
            cta.tensor.written[200 + column, lane] = True
    b_desc = descriptors.tcgen05_shared(place(cta, b, 4096, 0, False))
    tensorcore.execute(Mma(instruction, 200, b_desc, 0, False), [cta])
    sign = -1 if negate in (1, 2) else 1
    got = read_d(cta.tensor, "D", 128, 16, 0)
    np.testing.assert_allclose(got, sign * exact(a, b), rtol=2e-6, atol=2e-5)


def test_tf32_ignores_the_low_mantissa_bits() -> None:
    instruction = descriptors.instruction(instruction_word(64, 8, "tf32", "tf32"), "tf32", 1, False)
    a = np.full((64, 8), np.uint32(0x3F801FFF)).view(np.float32)
    b = np.ones((8, 8), np.float32)
    cta = new_cta()
    a_desc = descriptors.tcgen05_shared(place(cta, a, 0, 32, False))
    b_desc = descriptors.tcgen05_shared(place(cta, b, 8192, 32, False))
    tensorcore.execute(Mma(instruction, a_desc, b_desc, 0, False), [cta])
    assert (read_d(cta.tensor, "F", 64, 8, 0) == 8.0).all()


def small_case(**changes) -> tuple[Mma, MmaCta]:
    instruction = descriptors.instruction(
        instruction_word(64, 8, "e4m3", "e4m3"), "f8f6f4", 1, False
    )
    cta = new_cta()
    a_desc = descriptors.tcgen05_shared(
        place(cta, random_matrix((64, 32), "e4m3", 1), 1024, 32, False)
    )
    b_desc = descriptors.tcgen05_shared(
        place(cta, random_matrix((8, 32), "e4m3", 2), 8192, 32, False)
    )
    fields = {"a": a_desc, "b": b_desc, "d": 0, "accumulate": False} | changes
    return Mma(instruction, **fields), cta


def test_footprint_names_exactly_what_is_touched() -> None:
    mma, cta = small_case(accumulate=True)
    shared, reads, writes = tensorcore.footprint(mma, [5])
    granules = np.flatnonzero(cta.written.reshape(-1, 4).all(axis=1))
    assert sorted(np.concatenate([region.granules for region in shared])) == granules.tolist()
    assert {region.cta for region in shared} == {5}
    lanes = [d_cell("F", row, 0, 8)[0] for row in range(64)]
    assert writes[0].lanes.tolist() == lanes
    assert (writes[0].cta, writes[0].column, writes[0].width) == (5, 0, 8)
    assert reads == [writes[0]]


def test_never_written_operand_is_named() -> None:
    mma, cta = small_case()
    cta.written[1024 + 64] = 0
    with pytest.raises(HardwareError, match=r"never written: byte 0x440 \(row 2, byte 0 of"):
        tensorcore.execute(mma, [cta])


def test_bytes_between_the_rows_of_an_operand_need_not_be_written() -> None:
    instruction = descriptors.instruction(
        instruction_word(64, 8, "e4m3", "e4m3"), "f8f6f4", 1, False
    )
    cta = new_cta()
    a = random_matrix((64, 128), "e4m3", 3)
    a_word = place(cta, a, 1024, 128, False)
    for row in range(64):  # the last 16 bytes of every row vanish; K = 0..31 does not use them
        cta.written[swizzled(1024 + row * 128 + 112, 128)] = 0
    b = random_matrix((8, 32), "e4m3", 4)
    b_desc = descriptors.tcgen05_shared(place(cta, b, 32768, 32, False))
    tensorcore.execute(
        Mma(instruction, descriptors.tcgen05_shared(a_word), b_desc, 0, False), [cta]
    )
    np.testing.assert_allclose(
        read_d(cta.tensor, "F", 64, 8, 0), exact(a[:, :32], b), rtol=2e-6, atol=2e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": True}, "D at column 0 is an input, part"),
        ({"d": 508}, r"columns \[508, 516\) are not allocated"),
        ({"d": 8 << 16}, "D at lane 8, need 0 or 16"),
        ({"a": 300}, "64 rows a CTA is not modelled"),
        (
            {"a": descriptors.SharedDescriptor(SHARED - 1024, 16, 256, descriptors.swizzles.B32)},
            "reaches 0x18400, shared memory ends at 0x18000",
        ),
        (
            {"a": descriptors.SharedDescriptor(1040, 16, 256, descriptors.swizzles.B32)},
            "32 bytes from byte 16 of a row pass the end",
        ),
    ],
)
def test_illegal_operands(changes: dict, message: str) -> None:
    mma, cta = small_case(**changes)
    with pytest.raises(HardwareError, match=message):
        tensorcore.execute(mma, [cta])


def test_raw_operands_decode_to_the_same_mma() -> None:
    word = instruction_word(128, 64, "e4m3", "e4m3")
    a, b = (shared_descriptor(start, 16, 1024, 128) for start in (2048, 32768))
    decoded = tensorcore.decode("f8f6f4", word, a, b, 32, True, ctas=2)
    assert decoded == Mma(
        descriptors.instruction(word, "f8f6f4", 2, False),
        descriptors.SharedDescriptor(2048, 16, 1024, descriptors.swizzles.B128),
        descriptors.SharedDescriptor(32768, 16, 1024, descriptors.swizzles.B128),
        32,
        True,
        2,
    )
    assert tensorcore.decode("f8f6f4", word, 7, b, 32, True, a_in_tensor_memory=True).a == 7
