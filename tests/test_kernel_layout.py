"""The compile-time facts of the attention kernels: budgets, alignment, no overlaps."""

from __future__ import annotations

import itertools

import pytest

from mlakern.config import PAGE_SIZES, KernelConfig
from mlakern.kernels.blackwell.layout import (
    P_TILE_BYTES,
    Q_TILE_BYTES,
    AttentionLayout,
    TensorMemory,
    WarpSchedule,
)

# What a block can have, and columns of tensor memory (CUDA programming guide, compute capabilities
# 10.0, 10.3; PTX ISA, tcgen05.alloc for sm_107).
SHARED_LIMIT = {"sm_100a": 227 * 1024, "sm_103a": 227 * 1024, "sm_107a": 335_872}
TMEM_COLUMNS = {"sm_100a": 512, "sm_103a": 512, "sm_107a": 576}
LAYOUTS = [
    AttentionLayout(KernelConfig(arch=arch, tile_m=tile))
    for arch, tile in (
        ("sm_100a", 128),
        ("sm_100a", 64),
        ("sm_103a", 128),
        ("sm_107a", 128),
    )
]
NAMES = [layout.config.name for layout in LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_tiles_are_what_the_matrices_hold(layout: AttentionLayout) -> None:
    operands = layout.operands
    assert Q_TILE_BYTES == 64 * 576
    assert P_TILE_BYTES == 64 * 128
    # All CTAs of a tile together hold its 128 keys, and all 512 columns of their values.
    assert operands.ctas * operands.k_tile_bytes == 128 * 576
    assert operands.ctas * operands.value_blocks * 128 * 128 == 128 * 512
    assert sum(map(operands.group_bytes, operands.key_groups)) == operands.k_tile_bytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_shared_memory_fits_and_regions_follow_each_other(layout: AttentionLayout) -> None:
    shared, operands = layout.shared, layout.operands
    k = (shared.k, operands.k_stages * operands.k_tile_bytes)
    v = (shared.v, operands.v_stages * shared.value_tile_bytes)
    if operands.shares_values:
        assert (shared.v, shared.value_tile_bytes) == (shared.k, operands.k_tile_bytes)
    regions = [
        (shared.q, Q_TILE_BYTES),
        *([k] if operands.shares_values else [k, v]),
        (shared.p, shared.p_stages * P_TILE_BYTES),
        (shared.row_max, 2 * 128 * 4),
        (shared.factor, 2 * 64 * 4),
        (shared.row_sum, 128 * 4),
        (shared.final_max, 64 * 4),
        (shared.barriers, 8 * sum(b.stages for b in shared.barrier_list)),
        (shared.tmem_address, 4),
    ]
    for (start, size), (following, _) in itertools.pairwise(regions):
        assert start + size == following
    assert shared.tmem_address + 4 <= shared.size <= SHARED_LIMIT[layout.config.arch]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_every_operand_tile_starts_at_a_swizzle_atom(layout: AttentionLayout) -> None:
    shared = layout.shared
    starts = [shared.q, shared.k, shared.v, shared.p]
    assert [start % 1024 for start in starts] == [0, 0, 0, 0]
    sizes = [Q_TILE_BYTES, layout.operands.k_tile_bytes, shared.value_tile_bytes, P_TILE_BYTES]
    assert [size % 1024 for size in sizes] == [0, 0, 0, 0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_barriers_have_one_place_each(layout: AttentionLayout) -> None:
    shared = layout.shared
    places = [
        shared.barrier(barrier.name) + 8 * stage
        for barrier in shared.barrier_list
        for stage in range(barrier.stages)
    ]
    assert places == [shared.barriers + 8 * n for n in range(len(places))]
    with pytest.raises(KeyError):
        shared.barrier("no_such_barrier")


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_tensor_memory_columns_do_not_overlap(layout: AttentionLayout) -> None:
    tmem: TensorMemory = layout.tmem
    spans = [(tmem.s(0), 64), (tmem.s(1), 64), (tmem.o(0), 128), (tmem.o(1), 128)]
    for (start, width), (following, _) in itertools.pairwise(spans):
        assert start + width == following
    assert spans[-1][0] + spans[-1][1] <= tmem.columns == TMEM_COLUMNS[layout.config.arch]


def test_a_register_budget_above_the_file_is_refused() -> None:
    assert 128 * (208 + 232 + 64) <= 65536
    with pytest.raises(ValueError, match="65536"):
        WarpSchedule(softmax_registers=232)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_boxes_fill_a_cta_s_keys(page_size: int) -> None:
    layout = AttentionLayout(KernelConfig(page_size=page_size))
    assert layout.operands.keys % layout.box_rows == 0
    assert layout.box_rows == (64 if page_size == 128 else page_size)
