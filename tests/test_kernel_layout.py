"""The compile-time facts of the attention kernel: budgets, alignment, no overlaps."""

from __future__ import annotations

import itertools

import pytest

from mlakern.config import PAGE_SIZES, KernelConfig
from mlakern.kernels.blackwell.layout import (
    CTA_KEYS,
    P_TILE_BYTES,
    QK_TILE_BYTES,
    V_TILE_BYTES,
    AttentionLayout,
    SharedMemory,
    TensorMemory,
    WarpSchedule,
)

SHARED_LIMIT = 227 * 1024  # CUDA programming guide, compute capability 10.0
TMEM_COLUMNS = 512


def test_tiles_are_what_the_matrices_hold() -> None:
    assert QK_TILE_BYTES == 64 * 576
    assert V_TILE_BYTES == 128 * 256
    assert P_TILE_BYTES == 64 * 128


def test_shared_memory_fits_and_regions_follow_each_other() -> None:
    shared = SharedMemory()
    regions = [
        (shared.q, QK_TILE_BYTES),
        (shared.k, shared.k_stages * QK_TILE_BYTES),
        (shared.v, shared.v_stages * V_TILE_BYTES),
        (shared.p, shared.p_stages * P_TILE_BYTES),
        (shared.row_max, 2 * 128 * 4),
        (shared.factor, 2 * 128 * 4),
        (shared.row_sum, 128 * 4),
        (shared.barriers, 8 * sum(b.stages for b in shared.barrier_list)),
        (shared.tmem_address, 4),
    ]
    for (start, size), (following, _) in itertools.pairwise(regions):
        assert start + size == following
    assert shared.tmem_address + 4 <= shared.size <= SHARED_LIMIT


def test_every_operand_tile_starts_at_a_swizzle_atom() -> None:
    shared = SharedMemory()
    starts = [shared.q, shared.k, shared.v, shared.p]
    assert [start % 1024 for start in starts] == [0, 0, 0, 0]
    assert [size % 1024 for size in (QK_TILE_BYTES, V_TILE_BYTES, P_TILE_BYTES)] == [0, 0, 0]


def test_barriers_have_one_place_each() -> None:
    shared = SharedMemory()
    places = [
        shared.barrier(barrier.name) + 8 * stage
        for barrier in shared.barrier_list
        for stage in range(barrier.stages)
    ]
    assert places == [shared.barriers + 8 * n for n in range(len(places))]
    with pytest.raises(KeyError):
        shared.barrier("no_such_barrier")


def test_tensor_memory_columns_do_not_overlap() -> None:
    tmem = TensorMemory()
    spans = [(tmem.s(0), 64), (tmem.s(1), 64), (tmem.o(0), 128), (tmem.o(1), 128)]
    for (start, width), (following, _) in itertools.pairwise(spans):
        assert start + width == following
    assert spans[-1][0] + spans[-1][1] <= tmem.columns == TMEM_COLUMNS


def test_a_register_budget_above_the_file_is_refused() -> None:
    assert 128 * (208 + 232 + 64) <= 65536
    with pytest.raises(ValueError, match="65536"):
        WarpSchedule(softmax_registers=232)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_boxes_fill_half_a_key_tile(page_size: int) -> None:
    rows = AttentionLayout(KernelConfig(page_size=page_size)).k_box_rows
    assert CTA_KEYS % rows == 0
    assert rows == (64 if page_size == 128 else page_size)
