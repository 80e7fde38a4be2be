"""The device planner against the host's, and what the schedules promise about each other."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, Find
from numpy.typing import NDArray

from mlakern import work_list
from mlakern.config import SCHEDULES, KernelConfig
from mlakern.emulator import GlobalMemory, Module
from mlakern.planning import Plan, plan
from mlakern.reference import exact, modelled
from mlakern.runtime.arguments import pack
from mlakern.store import Entry
from mlakern.validation.backends import launches_of, place
from mlakern.validation.compare import Output, compare
from mlakern.validation.problem import Problem, visible_ranges
from mlakern.validation.run import numerics_of

LISTED = KernelConfig(schedule="work_list")
WINDOWED = LISTED.with_axes(mask="window")
POISON = -1


parsed = lru_cache(Module.from_ptx)


def planned(entry: Entry, made: Plan, lengths: list[int]) -> NDArray[np.int32]:
    """The words that the planner kernel writes."""
    kernel = entry.manifest.kernel("planner")
    memory = GlobalMemory()
    words = np.full(made.work_list_words, POISON, np.int32)
    values = {
        "seq_lens": memory.add("seq_lens", np.array(lengths, np.int32)),
        "work_list": memory.add("work_list", words, writable=True),
        "clusters": made.clusters,
        "batch": made.batch,
        "num_heads": made.num_heads,
        "seq_len_q": made.seq_len_q,
        "query_tiles": made.query_tiles,
        "tile_rows": made.tile_rows,
        "window_left": made.window_left,
        "window_causal": 1,
    }
    parsed(entry.load_ptx()).launch(
        kernel.entry,
        grid=(1, 1, 1),
        block=kernel.block,
        cluster=kernel.cluster,
        dynamic_shared=kernel.dynamic_shared,
        parameters=list(pack(kernel, values)),
        memory=memory,
    )
    return words


def read_words(words: Any, made: Plan) -> list[int]:
    """The words that a kernel reads, in order."""
    clusters, units = made.clusters, made.units
    partials = work_list.partials_offset(clusters)
    slots = work_list.slots_offset(clusters, units)
    items = work_list.items_offset(clusters, units)
    read = [int(word) for word in words[: clusters + 1 + units]]
    read += [int(words[slots + u]) for u in range(units) if words[partials + u] > 1]
    for item in range(int(words[clusters])):
        at = items + work_list.ITEM_WORDS * item
        read += [int(word) for word in words[at : at + 5]]
    return read


def random_lengths(rng: np.random.Generator, batch: int, longest: int) -> list[int]:
    """Log-uniform, with empty and one-key requests among them."""
    keys = np.exp(rng.uniform(0, math.log(longest), batch)).astype(int)
    keys[rng.random(batch) < 0.1] = 0
    keys[rng.random(batch) < 0.1] = 1
    return [int(k) for k in keys]


@pytest.mark.parametrize("seed", range(200))
def test_the_device_plans_what_the_host_plans(seed: int, find_kernel: Find) -> None:
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, int(rng.integers(1, 65)), 1 << 17)
    config, window = ((LISTED, -1), (LISTED, -1), (WINDOWED, 1000))[seed % 3]
    made = plan(
        config,
        lengths,
        num_heads=int(rng.choice([16, 128])),
        seq_len_q=int(rng.integers(1, 4)),
        multiprocessors=int(rng.choice([2, 4, 20, 148, 600])),
        window_left=window,
    )
    words = planned(find_kernel(config), made, lengths)
    assert read_words(words, made) == read_words(made.work_list(lengths), made)


def test_more_requests_than_threads_of_the_planner(find_kernel: Find) -> None:
    lengths = random_lengths(np.random.default_rng(1), 700, 2000)
    made = plan(LISTED, lengths, num_heads=128, seq_len_q=2, multiprocessors=148)
    words = planned(find_kernel(LISTED), made, lengths)
    assert read_words(words, made) == read_words(made.work_list(lengths), made)


def case(schedule: str, lengths: tuple[int, ...], **changes: Any) -> Case:
    values: dict[str, Any] = {"heads": 8, "tokens": 2, "multiprocessors": 8, **changes}
    return Case(schedule, KernelConfig(schedule=schedule), lengths=lengths, **values)


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [
        # A request of four tiles for each of four clusters: no partial results.
        ((512, 500, 490, 400), 1),
        # Sixteen tiles of one request: four runs of four.
        ((2048,), 4),
    ],
)
def test_equal_runs_give_equal_bits(
    lengths: tuple[int, ...], splits: int, find_kernel: Find
) -> None:
    grid = case("grid", lengths, splits=splits)
    others = [case(schedule, lengths, splits=splits) for schedule in SCHEDULES[1:]]
    hosted = replace(others[-1], more={"host_work_list": True})
    expected = grid.run(find_kernel)
    assert expected.lse is not None
    for other in (*others, hosted):
        assert other.problem().division == grid.problem().division
        output = other.run(find_kernel)
        assert output.lse is not None
        assert (output.out.view(np.uint16) == expected.out.view(np.uint16)).all()
        assert (output.lse == expected.lse).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_empty_short_and_padded_requests(schedule: str, find_kernel: Find) -> None:
    """Requests of a captured batch that are only padding have no keys and no pages."""
    lengths = (0, 1, 0, 0, 300, 2, 128, 0, 0)
    case(schedule, lengths, splits=3, races=True).check(find_kernel)
    case(schedule, (0, 0), splits=3).check(find_kernel)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
@pytest.mark.parametrize("tile", [64, 128])
def test_one_cluster_walks_everything(schedule: str, tile: int, find_kernel: Find) -> None:
    """Many short requests in a row, whose last tiles are partly filled: every ring turns often."""
    short = (5, 127, 1, 128, 64, 129, 0, 17, 300, 3, 260, 90)
    config = KernelConfig(schedule=schedule, tile_m=tile)
    walked = replace(case(schedule, short, splits=1, multiprocessors=1), config=config)
    walked.check(find_kernel)
    replace(walked, races=True, lengths=short[:6]).check(find_kernel)
    for seed in range(2):
        replace(walked, seed=seed).check(find_kernel)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_requests_of_one_run_leave_the_workspace_alone(schedule: str, find_kernel: Find) -> None:
    # The long request is divided; for the work list into runs of 6 and 5 of its 11 tiles.
    lengths = (100, 1400, 0, 1)
    divided = case(schedule, lengths, splits=4, multiprocessors=4)
    problem = divided.problem()
    output = divided.run(find_kernel)
    assert output.workspace is not None
    made = problem.plan
    size = made.tile_rows * 512
    partials = output.workspace[: made.slots * size * 4].view(np.float32).reshape(-1, size)
    lses = output.workspace[made.workspace.partial_lse_offset :][: made.slots * made.tile_rows * 4]
    written = ~np.isnan(partials).any(axis=1)
    untouched = np.isnan(partials).all(axis=1)
    assert (written | untouched).all()
    if schedule == "work_list":
        assert written.tolist() == [True] * 2 + [False] * (made.slots - 2)
        assert made.slots == 2
    else:
        # Slots of the second request, whose runs of three tiles are four.
        assert written.tolist() == [4 <= slot < 8 for slot in range(16)]
    lse_written = ~np.isnan(lses.view(np.float32).reshape(made.slots, -1))
    assert (lse_written.all(axis=1) == written).all()
    assert (lse_written.any(axis=1) == written).all()


def shortened(problem: Problem, output: Output, lengths: list[int]) -> Problem:
    """Other contents in the arrays of a problem that has run, the workspace as it was left."""
    kind = problem.plan.config.mask
    spec = replace(problem.spec, seq_lens=tuple(lengths))
    problem.fields["seq_lens"].array()[...] = lengths
    if kind == "visible":
        problem.fields["local_visible_lens"].array()[...] = spec.visible()
    if output.workspace is not None:
        problem.fields["workspace"].array()[...] = output.workspace
    keys = [k[:length] for k, length in zip(problem.attention.keys, lengths, strict=True)]
    ranges = visible_ranges(spec, problem.mask, lengths)
    attention = replace(problem.attention, keys=keys, visible=ranges)
    return replace(problem, spec=spec, attention=attention, division=problem.plan.division(lengths))


@pytest.mark.parametrize("mask", ["causal", "visible"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lengths_that_change_in_place(schedule: str, mask: str, find_kernel: Find) -> None:
    """The launches of a captured graph, replayed when seq_lens and visible lengths are others."""
    config = KernelConfig(schedule=schedule, mask=mask)
    made = replace(case(schedule, (700, 300, 200, 513), splits=3), config=config)
    entry, problem = find_kernel(config), made.problem()
    launches = launches_of(entry.manifest, problem, place(problem.buffers), "cuda:0")
    output = made.backend.execute(entry, problem)
    for lengths in ([1, 290, 0, 400], [0, 0, 0, 0], [700, 300, 200, 513], [640, 0, 1, 129]):
        problem = shortened(made.problem(), output, lengths)
        again = launches_of(entry.manifest, problem, place(problem.buffers), "cuda:0")
        assert again == launches
        output = made.backend.execute(entry, problem)
        model = modelled(problem.attention, numerics_of(problem), problem.division)
        errors = compare(output, exact(problem.attention), model)
        assert [m for m in errors if not m.passed] == []
