"""Every mask in every schedule, folded and packed, and the edges of windows and visible prefixes.

Schedules other than "grid" run on few multiprocessors, so that each cluster walks several items.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, Find, scalars

from mlakern.config import MASKS, SCHEDULES, KernelConfig
from mlakern.reference import exact
from mlakern.validation.compare import compare
from mlakern.validation.problem import Problem

# Values for each mask; a case's mask looks at its own only.
MASK_VALUES: dict[str, Any] = {
    "window_left": 200,
    "cp_world": 4,
    "cp_rank": 1,
    "cp_interleave": 16,
}


def combined(mask: str, schedule: str, packed: bool, tile: int = 128, **axes: Any) -> Case:
    """Requests of no, few and many tiles; packed rows make two query tiles, the last of few rows.

    Splits that differ by request, the race detector or late copies: each in some of the cases.
    """
    config = KernelConfig(mask=mask, schedule=schedule, pack_q=packed, tile_m=tile, **axes)
    rows = {128: (16, 43), 64: (16, 22)}[tile]
    lengths = (300, 0, 1, 700, 128)
    number = MASKS.index(mask) + SCHEDULES.index(schedule)
    more = dict(MASK_VALUES)
    if schedule != "work_list" and number % 2:
        more["block_split_kvs"] = (2, 1, 3, 3, 9)
    return Case(
        config.name,
        config,
        rows[packed],
        tokens=3,
        lengths=lengths if mask != "dcp" else tuple(4 * n for n in lengths),
        splits=3,
        multiprocessors=8,
        more=more,
        races=number % 3 == 0,
        seed=number if number % 3 == 1 else None,
    )


SOME = [
    *(combined(mask, schedule, packed=False) for mask in MASKS for schedule in SCHEDULES),
    *(combined(mask, SCHEDULES[n % 3], packed=True) for n, mask in enumerate(MASKS)),
    combined("window", "work_list", packed=True, tile=64),
    combined("dcp", "persistent", packed=False, tile=64, page_size=16),
    combined("visible", "grid", packed=True, tile=64, out_dtype="float8_e4m3fn"),
    combined("causal", "work_list", packed=False, arch="sm_103a"),
    combined("window", "persistent", packed=True, arch="sm_107a", partial_dtype="float16"),
]
EVERY = itertools.product(MASKS, SCHEDULES, (False, True), (64, 128))
OTHERS = [
    case
    for axes in EVERY
    if (case := combined(*axes)).config not in {chosen.config for chosen in SOME}
]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.what)
def test_masks_and_schedules(case: Case, find_kernel: Find) -> None:
    case.check(find_kernel)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.what)
def test_the_other_masks_and_schedules(case: Case, find_kernel: Find) -> None:
    case.check(find_kernel)


def random_case(seed: int) -> Case:
    """One of the kernels above with values drawn at random."""
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    config = SOME[seed % len(SOME)].config
    tokens = int(rng.integers(1, 9))
    heads = int(rng.integers(1, 65 if tokens < 3 else 33))
    world = int(rng.integers(1, 9))
    lengths = tuple(
        int(n) * (world if config.mask == "dcp" else 1)
        for n in rng.integers(0, pick(5, 400, 700), rng.integers(1, 8))
    )
    more = {
        "window_left": tokens - 1 + int(rng.integers(0, pick(3, 300, 1000))),
        "causal": bool(rng.integers(2)),
        "cp_world": world,
        "cp_rank": int(rng.integers(world)),
        "cp_interleave": pick(1, 2, 16, 100),
        "host_work_list": config.schedule == "work_list" and seed % 4 == 0,
        "seed": seed,
        "values": pick("random", "ramp"),
        "scalars": scalars(rescale_threshold=pick(0.0, 8.0), lse_base=pick("2", "e")),
    }
    if config.schedule != "work_list" and pick(True, False):
        more["block_split_kvs"] = tuple(int(n) for n in rng.integers(0, 7, len(lengths)))
    return Case(
        f"seed {seed}",
        config,
        heads,
        tokens,
        lengths,
        splits=pick(None, 1, 2, 5),
        multiprocessors=pick(2, 4, 9, 148),
        more=more,
        races=seed % 5 == 0,
        seed=seed if seed % 5 == 1 else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_problems(seed: int, find_kernel: Find) -> None:
    random_case(seed).check(find_kernel)


def moved(problem: Problem, lower: int, upper: int) -> Problem:
    """The problem with every bound of its reference moved by these numbers of keys."""
    visible = problem.attention.visible + np.array([lower, upper])
    for keys, ranges in zip(problem.attention.keys, visible, strict=True):
        np.clip(ranges, 0, len(keys), out=ranges)
    return replace(problem, attention=replace(problem.attention, visible=visible))


@pytest.mark.parametrize(
    ("mask", "lower", "upper"),
    [("causal", 0, 1), ("window", -1, 0), ("window", 0, 1), ("dcp", 0, -1), ("visible", 0, 1)],
)
def test_one_key_more_or_less_is_noticed(
    mask: str, lower: int, upper: int, find_kernel: Find
) -> None:
    """The comparisons above can fail."""
    case = replace(
        combined(mask, "grid", packed=False),
        lengths=(80, 170),
        more={**MASK_VALUES, "window_left": 20, "cp_world": 2, "visible_lens": ((7,) * 3,) * 2},
    )
    problem = case.problem()
    output = case.run(find_kernel)

    def worst(of: Problem) -> float:
        reference = exact(of.attention)
        errors = compare(output, reference, reference)
        return next(m.error for m in errors if m.name == "lse_vs_exact")

    assert worst(problem) < 1e-5
    assert worst(moved(problem, lower, upper)) > 2e-3


def window(what: str, length: int, left: int, tokens: int = 4, **changes: Any) -> list[Case]:
    """A decoder's and a drafter's window, in runs of the grid and in shares of a work list."""
    return [
        Case(
            f"{what}, {'causal' if causal else 'whole block'}, {schedule}",
            KernelConfig(mask="window", schedule=schedule),
            heads=4,
            tokens=tokens,
            lengths=(length, 3),
            multiprocessors=6,
            more={"window_left": left, "causal": causal},
            **changes,
        )
        for causal, schedule in ((True, "grid"), (False, "work_list"))
    ]


# The first token sees keys from length - tokens - left on.
WINDOWS = [
    # 900 - 4 - 400 = 496 is in tile 3; tiles 3 to 7 in runs of 3 and 2.
    *window("the edge inside the first tile of a run", 900, 400, splits=2),
    # 900 - 4 - 640 = 256: the window begins where a tile does.
    *window("the edge between two tiles", 900, 640, splits=2),
    # Tokens begin at 254 to 257: in the first and in the middle tile of tiles 1 to 3.
    *window("tokens begin in the first and in a middle tile", 510, 252),
    # Tokens begin at 254 to 257: in the first and in the last tile of tiles 1 and 2.
    *window("tokens begin in the first and in the last tile", 382, 124),
    # One tile in a run: later tokens see nothing in the first one.
    *window("a run that some tokens do not see", 382, 124, splits=2),
    *window("no more than the block", 300, 3, splits=2),
    *window("one token and nothing else", 257, 0, tokens=1),
    *window("longer than the request", 300, 5000, splits=2),
    *window("as long as the request", 300, 296),
    *window("far inside a long request", 20_000, 127, splits=2),
]


@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.what)
def test_windows(case: Case, find_kernel: Find) -> None:
    case.check(find_kernel)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_that_see_nothing_beside_rows_that_see_all(schedule: str, find_kernel: Find) -> None:
    """In one query tile; prefixes beyond the request's keys, and below none, are clamped."""
    lengths = (300, 257, 128, 0)
    visible = ((0, 300, 129, 128), (1 << 30, 0, 256, 257), (-5, 127, 128, 1), (0, 9, 0, -1))
    case = Case(
        "visible",
        KernelConfig(mask="visible", schedule=schedule),
        heads=8,
        tokens=4,
        lengths=lengths,
        splits=2,
        multiprocessors=6,
        more={"visible_lens": visible},
        races=schedule == "grid",
    )
    case.check(find_kernel)
    output = case.run(find_kernel)
    assert output.lse is not None
    empty = np.array(visible) <= 0
    empty[3] = True
    assert ((output.lse == -np.inf).all(axis=-1) == empty).all()
    assert (output.out[empty] == 0).all()
