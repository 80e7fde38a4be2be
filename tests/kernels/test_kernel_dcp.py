"""Context parallelism: what the ranks compute, merged by LSE, is the attention over all keys."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from kernel_cases import Case, Find

from mlakern.config import KernelConfig
from mlakern.reference import Result, exact, merge
from mlakern.validation.compare import relative_l2

WORLDS, INTERLEAVES = (1, 2, 4, 8, 16), (1, 4, 64)
HEADS, TOKENS = (6, 12, 48, 128), (1, 4, 8)
WHOLE = KernelConfig(mask="causal")

Parameters = tuple[int, int, int, int]


def lengths_for(world: int, interleave: int) -> tuple[int, ...]:
    """None, one, fewer than ranks, and a stripe and a half of all ranks."""
    return (0, 1, world - 1, min(world * interleave * 3 // 2, 700) + 1)


def ranks(parameters: Parameters, schedule: str = "grid") -> list[Case]:
    """The problem of every rank; all have the same queries and their share of the same keys."""
    world, interleave, heads, tokens = parameters
    config = KernelConfig(mask="dcp", schedule=schedule)
    return [
        Case(
            f"rank {rank}",
            config,
            heads,
            tokens,
            lengths_for(world, interleave),
            splits=2,
            multiprocessors=6,
            more={"cp_world": world, "cp_rank": rank, "cp_interleave": interleave},
        )
        for rank in range(world)
    ]


def whole(parameters: Parameters) -> Case:
    """The same problem on one device, with the causal kernel."""
    return replace(ranks(parameters)[0], config=WHOLE, splits=1)


def check(merged: Result, want: Result, tolerance: float) -> None:
    """tolerance: relative L2 of out."""
    assert (np.isneginf(merged.lse) == np.isneginf(want.lse)).all()
    seen = np.isfinite(want.lse)
    np.testing.assert_allclose(merged.lse[seen], want.lse[seen], atol=1e-4)
    assert relative_l2(merged.out, want.out) < tolerance
    assert (merged.out[~seen] == 0).all()


EVERY = list(itertools.product(WORLDS, INTERLEAVES, HEADS, TOKENS))


@pytest.mark.parametrize(("world", "interleave"), list(itertools.product(WORLDS, INTERLEAVES)))
def test_exact_results_of_the_ranks_merge(world: int, interleave: int) -> None:
    """The arithmetic of the mask itself, without a kernel, for every shape."""
    for heads, tokens in itertools.product(HEADS, TOKENS):
        parameters = (world, interleave, heads, tokens)
        parts = [exact(case.problem().attention) for case in ranks(parameters)]
        merged = merge([part.out for part in parts], [part.lse for part in parts])
        check(merged, exact(whole(parameters).problem().attention), 1e-12)


# Each world, interleave, number of heads and of tokens; schedules in turn.
SOME: list[tuple[Parameters, str]] = [
    ((1, 64, 128, 1), "grid"),
    ((2, 1, 48, 4), "persistent"),
    ((4, 4, 6, 8), "work_list"),
    ((8, 64, 12, 4), "grid"),
    ((16, 1, 6, 1), "grid"),
    ((4, 64, 48, 8), "persistent"),
]


def run_ranks(parameters: Parameters, schedule: str, find_kernel: Find) -> None:
    """Ranks against their own references, merged against the run over all keys and its truth."""
    outs, lses = [], []
    for case in ranks(parameters, schedule):
        output = case.run(find_kernel)
        assert output.lse is not None
        outs.append(output.out.astype(np.float64))
        lses.append(output.lse.astype(np.float64))
    merged = merge(outs, lses)
    single = whole(parameters)
    output = single.run(find_kernel)
    assert output.lse is not None
    kernel = Result(output.out.astype(np.float64), output.lse.astype(np.float64))
    # Two roundings of the probabilities to e4m3 on each side.
    check(merged, kernel, 4e-2)
    check(merged, exact(single.problem().attention), 4e-2)


@pytest.mark.parametrize(("parameters", "schedule"), SOME, ids=str)
def test_ranks_merge_to_the_single_run(
    parameters: Parameters, schedule: str, find_kernel: Find
) -> None:
    run_ranks(parameters, schedule, find_kernel)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EVERY)), ids=lambda n: str(EVERY[n]))
def test_every_world_interleave_and_shape(number: int, find_kernel: Find) -> None:
    run_ranks(EVERY[number], ("grid", "persistent", "work_list")[number % 3], find_kernel)
