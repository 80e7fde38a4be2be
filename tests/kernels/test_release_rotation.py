"""A part of the release set is built and run each day, so that all of it is within some weeks.

$MLAKERN_ROTATION chooses the part (an integer; by default the days since 1970): a failure names it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from kernel_cases import Find

from mlakern.matrix import load_matrix
from mlakern.performance import budgets
from mlakern.performance.budgets import Budget, excesses
from mlakern.performance.profile import profile
from mlakern.validation.sweep import check

REPOSITORY = Path(__file__).parents[2]
# Kernels in a part: a few seconds each to compile and to run.
PART = 8
RELEASE = [item.config for item in load_matrix(REPOSITORY / "build_matrix.yaml").sets["release"]]
PARTS = -(-len(RELEASE) // PART)


def rotation() -> int:
    return int(os.environ.get("MLAKERN_ROTATION", time.time() // 86400)) % PARTS


def test_the_parts_are_the_whole_set() -> None:
    parts = [RELEASE[part::PARTS] for part in range(PARTS)]
    assert sorted(config for part in parts for config in part) == sorted(RELEASE)
    assert max(map(len, parts)) <= PART


# By number, so that test processes that are started around midnight collect the same.
@pytest.mark.parametrize("number", range(PART))
def test_a_kernel_of_this_part_is_right_and_within_its_budget(
    number: int, find_kernel: Find
) -> None:
    part = rotation()
    print(f"part {part} of {PARTS}; again with MLAKERN_ROTATION={part}")
    configs = RELEASE[part::PARTS]
    # The last of a shorter part is run twice rather than none.
    entry = find_kernel(configs[min(number, len(configs) - 1)])
    finding = check(entry)
    assert finding.passed, f"{finding.name}: {finding.reason} ({finding.statement})"
    measured = Budget.of(profile(entry.manifest, entry.load_cubin()))
    allowed = budgets.read(REPOSITORY / budgets.FILE_NAME)[finding.name]
    assert not excesses(finding.name, measured, allowed), "make budgets, if the growth is meant"
