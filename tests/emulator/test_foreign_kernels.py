"""Kernels that nvcc compiled from ordinary CUDA C++ (foreign/foreign.cu), compared with numpy.

They are right on hardware, so a difference is a fault of the emulator. Each runs plainly, with the
race detector and with delayed work and a shuffled schedule. One more is written in CuTe.
"""

from __future__ import annotations

import math
import re
import struct
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mlakern.emulator import EmulatorError, GlobalMemory, Module, Options

FOLDER = Path(__file__).parent / "foreign"
ARCHITECTURES = ("sm90", "sm100a")
OPTIONS = {
    "plain": Options(),
    "races": Options(races=True),
    "delayed": Options(delay=True, seed=3),
}
WARP = 32


def text_of(arch: str) -> str:
    return (FOLDER / f"foreign_{arch}.ptx").read_text()


@cache
def module_of(arch: str) -> Module:
    return Module.from_ptx(text_of(arch))


class Launcher:
    """Launches kernels of one module: arrays go to global memory, integers are 32 bits."""

    def __init__(self, module: Module, options: Options) -> None:
        self.module = module
        self.options = options

    def __call__(
        self,
        entry: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *arguments: NDArray[Any] | int | bytes,
        cluster: tuple[int, int, int] = (1, 1, 1),
        dynamic_shared: int = 0,
    ) -> None:
        """Arrays are changed in place."""
        memory = GlobalMemory()
        parameters = []
        for number, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray):
                address = memory.add(f"argument {number}", argument, writable=True)
                parameters.append(address.to_bytes(8, "little"))
            elif isinstance(argument, int):
                parameters.append(struct.pack("<i", argument))
            else:
                parameters.append(argument)
        x, y, z = (*grid, 1, 1)[:3]
        bx, by, bz = (*block, 1, 1)[:3]
        self.module.launch(
            entry,
            grid=(x, y, z),
            block=(bx, by, bz),
            cluster=cluster,
            dynamic_shared=dynamic_shared,
            parameters=parameters,
            memory=memory,
            options=self.options,
        )


@pytest.fixture(params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(OPTIONS))
def launch(request: pytest.FixtureRequest, arch: str) -> Launcher:
    return Launcher(module_of(arch), OPTIONS[request.param])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def signed(value: int, bits: int = 32) -> int:
    """The low bits of an integer as two's complement."""
    low = int(value) & ((1 << bits) - 1)
    return low - (low >> (bits - 1) << bits)


def unsigned(value: int) -> int:
    return int(value) & 0xFFFFFFFF


def test_block_sum(launch: Launcher, rng: np.random.Generator) -> None:
    x, total = normal(rng, 1000), np.zeros(1, np.float32)
    launch("block_sum", (3,), (96,), x, len(x), total)
    np.testing.assert_allclose(total[0], (x.astype(np.float64) ** 2).sum(), rtol=1e-5)


def test_histogram(launch: Launcher, rng: np.random.Generator) -> None:
    x = rng.integers(0, 64, 700).astype(np.uint8)
    x[:200] = 7
    bins = np.zeros(256, np.uint32)
    launch("histogram", (2,), (64,), x, len(x), bins)
    assert bins.tolist() == np.bincount(x, minlength=256).tolist()


def test_transpose(launch: Launcher, rng: np.random.Generator) -> None:
    x, out = normal(rng, 45, 70), np.zeros((70, 45), np.float32)
    launch("transpose", (3, 2), (32, 8), x, out, 70, 45)
    assert np.array_equal(out, x.T)


def test_collatz(launch: Launcher, rng: np.random.Generator) -> None:
    def steps(value: int, limit: int) -> int:
        count = 0
        while value != 1:
            if count == limit:
                return 0xFFFFFFFF
            count += 1
            value = 3 * value + 1 if value & 1 else value >> 1
        return count

    start, found = rng.integers(1, 1000, 100).astype(np.uint32), np.zeros(100, np.uint32)
    launch("collatz", (2,), (64,), start, found, 100, 60)
    wanted = [steps(int(value), 60) for value in start]
    assert found.tolist() == wanted
    assert 0xFFFFFFFF in wanted


def truncated(a: int, b: int) -> int:
    """C's quotient, which rounds to zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def selected_bytes(a: int, b: int, selector: int) -> int:
    source = unsigned(a).to_bytes(4, "little") + unsigned(b).to_bytes(4, "little")
    return int.from_bytes(bytes(source[selector >> 4 * k & 7] for k in range(4)), "little")


INTEGER_OPERATIONS = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    truncated,
    lambda a, b: a - truncated(a, b) * b,
    min,
    lambda a, b: a << (b & 31),
    lambda a, b: (32 - unsigned(a).bit_length()) * 100 + bin(unsigned(b)).count("1"),
    lambda a, b: int(f"{unsigned(a):032b}"[::-1], 2) ^ selected_bytes(a, b, 0x5140),
    lambda a, b: (unsigned(b) << 32 | unsigned(a)) >> 7,
    lambda a, b: (a * b >> 32) + abs(unsigned(a) - unsigned(b)) + 3,
    lambda a, b: (a ^ b) + (a & ~b),
    lambda a, _: abs(a),
)


def test_dispatch(launch: Launcher, rng: np.random.Generator) -> None:
    n = 300
    operation = (np.arange(n) % len(INTEGER_OPERATIONS)).astype(np.int32)
    a = rng.integers(-(2**31), 2**31, n).astype(np.int32)
    b = rng.choice([-100, -7, -1, 1, 2, 13, 31, 33, 2**31 - 1, -(2**31) + 1], n).astype(np.int32)
    out = np.zeros(n, np.int32)
    launch("dispatch", (3,), (128,), operation, a, b, out, n)
    cases = zip(operation.tolist(), a.tolist(), b.tolist(), strict=True)
    assert out.tolist() == [signed(INTEGER_OPERATIONS[k](x, y)) for k, x, y in cases]


def test_sort_in_local_memory(launch: Launcher, rng: np.random.Generator) -> None:
    rows = rng.integers(-1000, 1000, (70, 16)).astype(np.int32)
    wanted = np.sort(rows, axis=1)
    launch("sort16", (3,), (32,), rows, len(rows))
    assert np.array_equal(rows, wanted)


def test_halves(launch: Launcher, rng: np.random.Generator) -> None:
    n = 50
    a, b = (rng.standard_normal((n, 2)).astype(np.float16) for _ in range(2))
    c = rng.standard_normal((n, 2)).astype(ml_dtypes.bfloat16)
    out, out16 = np.zeros_like(a), np.zeros_like(c)
    launch("halves", (2,), (32,), a, b, out, c, out16, n)
    # Products and sums of two half-precision numbers are exact in float64: one rounding each.
    p = (a.astype(np.float64) * b - a).astype(np.float16)
    p = np.maximum(p, a * np.float16(0.5))
    p = np.where(p[:, :1] < p[:, 1:], p[:, ::-1], p)
    assert np.array_equal(out, p + (b - a))
    q = (c.astype(np.float64) ** 2 + [1, -1]).astype(ml_dtypes.bfloat16)
    assert np.array_equal(out16, np.minimum(np.abs(q), ml_dtypes.bfloat16(3)))


def test_warp_tools(launch: Launcher, rng: np.random.Generator) -> None:
    n, threads = 90, 96
    x = rng.integers(0, 9, n).astype(np.int32)
    scan, sums = np.zeros(n, np.int32), np.zeros(n, np.int32)
    votes, matches = np.zeros(n, np.uint32), np.zeros(n, np.uint32)
    launch("warp_tools", (1,), (threads,), x, scan, votes, matches, sums, n)
    padded = np.zeros(threads, np.int64)
    padded[:n] = x
    for first in range(0, threads, WARP):
        values = padded[first : first + WARP]
        ballot = sum(int(value > 3) << lane for lane, value in enumerate(values))
        vote = unsigned(ballot + int((values == 5).any()) + 2 * int((values < 9).all()))
        reduced = int(values.sum()) ^ int(values.max()) ^ int(np.bitwise_xor.reduce(values))
        for lane in range(min(WARP, n - first)):
            assert scan[first + lane] == values[: lane + 1].sum()
            assert votes[first + lane] == vote
            same = sum(int(value == values[lane]) << k for k, value in enumerate(values))
            assert matches[first + lane] == same
            assert sums[first + lane] == reduced + values[lane // 8 * 8 + (lane + 3) % 8]


def test_wide_integers(launch: Launcher, rng: np.random.Generator) -> None:
    n = 40
    a = rng.integers(0, 2**63, n).astype(np.uint64) * 2 + 1
    b = rng.integers(1, 2**40, n).astype(np.uint64)
    b[::5] = a[::5] // 3
    a[::3] >>= 30
    out = np.zeros(n, np.uint64)
    launch("wide", (2,), (32,), a, b, out, n)
    for got, x, y in zip(out.tolist(), a.tolist(), b.tolist(), strict=True):
        bits = (64 - x.bit_length()) ^ bin(y).count("1")
        assert got == math.gcd(x, y) ^ (x * y >> 64) ^ x // (y | 1) ^ bits


def test_ring_of_a_cluster(launch: Launcher, rng: np.random.Generator) -> None:
    x, out = normal(rng, 2, 4, 64), np.zeros((2, 4, 64), np.float32)
    launch("ring", (8,), (64,), x, out, cluster=(4, 1, 1))
    assert np.array_equal(out, x + np.roll(x, -1, axis=1)[:, :, ::-1])


def test_constants(launch: Launcher, rng: np.random.Generator) -> None:
    n = 50
    x, out, count = normal(rng, n, 4), np.zeros((n, 4), np.float32), np.zeros(1, np.uint32)
    pair = struct.pack("<fhbx", 1.5, -300, 7)
    launch("constants", (2,), (32,), pair, x, out, n, count)
    weights = np.array([0.5, -1, 2, 0.25], np.float32)
    wanted = [x[:, 0] / 2 + 1.5, x[:, 1] * weights[np.arange(n) % 4], x[:, 2] - 300, x[:, 3] - 7]
    np.testing.assert_allclose(out, np.stack(wanted, 1), rtol=1e-6)
    assert count[0] == 5


def test_pipeline(launch: Launcher, rng: np.random.Generator) -> None:
    x, out = normal(rng, 5, 128), np.zeros((5, 128), np.float32)
    launch("pipeline", (1,), (128,), x, out, len(x))
    assert np.array_equal(out, x[:, ::-1] + np.arange(5, dtype=np.float32)[:, None])


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_softmax_in_cute(target: str, rng: np.random.Generator, tmp_path: Path) -> None:
    import cute_softmax

    columns = 300
    module = Module.from_ptx(cute_softmax.ptx(target, columns, tmp_path))
    (entry,) = module.entries
    x = (3 * normal(rng, cute_softmax.ROWS, columns)).astype(np.float16)
    weights = np.exp(x.astype(np.float64))
    for options in OPTIONS.values():
        y = np.zeros(x.shape, ml_dtypes.bfloat16)
        launch = Launcher(module, options)
        block = (cute_softmax.THREADS,)
        launch(entry, (cute_softmax.ROWS,), block, x, y, columns, dynamic_shared=16)
        error = y.astype(np.float64) / (weights / weights.sum(axis=1, keepdims=True)) - 1
        assert np.max(np.abs(error)) < 2**-8  # bfloat16 rounds by 2^-9 at most, and a little more


def altered(arch: str, entry: str, pattern: str, replacement: str) -> Module:
    """The module with the first match of a pattern after the start of an entry replaced."""
    text = text_of(arch)
    start = text.index(f".entry {entry}(")
    changed, count = re.subn(pattern, replacement, text[start:], count=1)
    assert count == 1
    return Module.from_ptx(text[:start] + changed)


@pytest.mark.parametrize(
    ("entry", "pattern", "replacement"),
    [
        ("transpose", r"bar\.sync\s+0;", ""),
        ("histogram", r"bar\.sync\s+0;", ""),
        ("pipeline", r"bar\.sync\s+0;", ""),
        ("ring", r"barrier\.cluster\.arrive\.aligned;\s*barrier\.cluster\.wait\.aligned;", ""),
    ],
)
def test_missing_synchronisation_is_found(
    arch: str, entry: str, pattern: str, replacement: str, rng: np.random.Generator
) -> None:
    launch = Launcher(altered(arch, entry, pattern, replacement), OPTIONS["races"])
    x, out = normal(rng, 8, 128), np.zeros((8, 128), np.float32)
    with pytest.raises(EmulatorError, match=r"race|never written"):
        if entry == "transpose":
            launch(entry, (4, 1), (32, 8), x, out, 128, 8)
        elif entry == "histogram":
            launch(entry, (1,), (64,), x.view(np.uint8), 64, out.view(np.uint32))
        elif entry == "ring":
            launch(entry, (4,), (64,), x, out, cluster=(4, 1, 1))
        else:
            launch(entry, (1,), (128,), x, out, 8)


def test_an_access_past_the_end_names_instruction_and_thread(arch: str) -> None:
    launch = Launcher(module_of(arch), OPTIONS["plain"])
    with pytest.raises(EmulatorError, match=r"(?s)ld\.global.*line \d+|line \d+.*ld\.global"):
        launch("collatz", (1,), (64,), np.ones(63, np.uint32), np.ones(64, np.uint32), 64, 9)
