"""Descriptor fields one by one, and every field that must be refused."""

from __future__ import annotations

import pytest

from mlakern.emulator import descriptors, swizzle
from mlakern.emulator.hardware_error import HardwareError

GOOD = 0x1000 >> 4 | 1 << 16 | 1024 >> 4 << 32 | 1 << 46 | 2 << 61  # 128-byte swizzle
IDESC = 1 << 4 | 128 // 8 << 17 | 128 // 16 << 24


def test_tcgen05_shared_descriptor_fields() -> None:
    decoded = descriptors.tcgen05_shared(0x00C0 | 0x21 << 16 | 0x40 << 32 | 1 << 46 | 4 << 61)
    assert decoded == descriptors.SharedDescriptor(0xC00, 0x210, 0x400, swizzle.B64)


@pytest.mark.parametrize(
    ("code", "mode"),
    [
        (0, swizzle.NONE),
        (1, swizzle.B128_ATOM32),
        (2, swizzle.B128),
        (4, swizzle.B64),
        (6, swizzle.B32),
    ],
)
def test_tcgen05_swizzle_codes(code: int, mode: swizzle.SharedSwizzle) -> None:
    assert descriptors.tcgen05_shared(1 << 46 | code << 61).swizzle is mode


@pytest.mark.parametrize(
    ("code", "mode"),
    [(0, swizzle.NONE), (1, swizzle.B128), (2, swizzle.B64), (3, swizzle.B32)],
)
def test_wgmma_descriptor(code: int, mode: swizzle.SharedSwizzle) -> None:
    decoded = descriptors.wgmma_shared(0x40 | 2 << 16 | 3 << 32 | code << 62)
    assert decoded == descriptors.SharedDescriptor(0x400, 0x20, 0x30, mode)


@pytest.mark.parametrize(
    ("flipped", "message"),
    [
        (1 << 46, "bits \\[46:49\\) are 0b000, need 0b001"),
        (1 << 47, "need 0b001"),
        (1 << 52, "leading dimension mode"),
        (1 << 53, "bits \\[53:61\\)"),
        (1 << 60, "bits \\[53:61\\)"),
        (1 << 61, "swizzle 3, need one of \\[0, 1, 2, 4, 6\\]"),
        (1 << 49, "base offset 1"),
        (1 << 14, "bits \\[14:16\\) are set"),
        (1 << 30, "bits \\[30:32\\) are set"),
    ],
)
def test_bad_shared_descriptors(flipped: int, message: str) -> None:
    assert descriptors.tcgen05_shared(GOOD).start == 0x1000
    with pytest.raises(HardwareError, match=message):
        descriptors.tcgen05_shared(GOOD ^ flipped)


def test_fifteen_bit_addresses_only_where_asked_for() -> None:
    word = 1 << 14 | 1 << 46
    assert descriptors.tcgen05_shared(word, address_bits=15).start == 1 << 18
    with pytest.raises(HardwareError):
        descriptors.tcgen05_shared(word)


def test_instruction_descriptor_fields() -> None:
    word = 1 << 4 | 1 << 7 | 0 << 10 | 1 << 14 | 1 << 16 | 256 // 8 << 17 | 256 // 16 << 24
    decoded = descriptors.instruction(word, "f8f6f4", 2, False)
    assert (decoded.m, decoded.n, decoded.k) == (256, 256, 32)
    assert (decoded.a_format, decoded.b_format) == ("e5m2", "e4m3")
    assert (decoded.a_mn_major, decoded.b_mn_major) == (False, True)
    assert decoded.negative
    both = descriptors.instruction(word | 1 << 13, "f8f6f4", 2, False)
    assert not both.negative


@pytest.mark.parametrize(
    ("kind", "formats", "k"),
    [("f8f6f4", 0, 32), ("f16", 1 << 7 | 1 << 10, 16), ("tf32", 2 << 7 | 2 << 10, 8)],
)
def test_k_follows_from_the_kind(kind, formats: int, k: int) -> None:
    assert descriptors.instruction(IDESC | formats, kind, 1, False).k == k


def test_wide_k_of_sm_107() -> None:
    assert descriptors.instruction(IDESC | 1 << 29, "f8f6f4", 1, False, wide_k=True).k == 64
    with pytest.raises(HardwareError, match="bit 29"):
        descriptors.instruction(IDESC | 1 << 29, "f8f6f4", 1, False)


@pytest.mark.parametrize(
    ("word", "kind", "cta_group", "ws", "message"),
    [
        (IDESC | 1 << 2, "f8f6f4", 1, False, "sparsity"),
        (IDESC | 1 << 3, "f8f6f4", 1, False, "saturation"),
        (IDESC | 1 << 5, "f8f6f4", 1, False, "D format 3"),
        (IDESC | 3 << 7, "f8f6f4", 1, False, "A format 3, kind::f8f6f4 needs one of 0"),
        (IDESC | 2 << 10, "f16", 1, False, "B format 2, kind::f16 needs one of 0 .f16., 1 .bf16."),
        (IDESC | 1 << 30, "f8f6f4", 1, True, "shift"),
        (IDESC | 1 << 23, "f8f6f4", 1, False, "reserved"),
        (IDESC, "f8f6f4", 2, True, "need .cta_group::1"),
        (1 << 4 | 16 << 17 | 16 << 24, "f8f6f4", 1, False, "M is 256, need one of .64, 128"),
        (1 << 4 | 16 << 17 | 4 << 24, "f8f6f4", 2, False, "M is 64, need one of .128, 256"),
        (1 << 4 | 33 << 17 | 8 << 24, "f8f6f4", 1, False, "N is 264, need 8 to 256 in steps of 8"),
        (1 << 4 | 3 << 17 | 8 << 24, "f8f6f4", 2, False, "N is 24, need 16 to 256 in steps of 16"),
        (1 << 4 | 4 << 17 | 8 << 24, "f8f6f4", 1, True, "N is 32, need one of 64, 128, 256"),
        (1 << 4 | 0 << 17 | 8 << 24, "f8f6f4", 1, False, "N is 0"),
    ],
)
def test_bad_instruction_descriptors(word, kind, cta_group, ws, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        descriptors.instruction(word, kind, cta_group, ws)
