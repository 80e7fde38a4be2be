"""The decode kernel under the race detector: clean as it is, noticed whatever order is removed.

The synchronisations removed are those of which none is redundant in any design of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from mlakern.config import KernelConfig
from mlakern.emulator import DeadlockError, EmulatorError
from mlakern.emulator.races import RaceError
from mlakern.manifest import Manifest
from mlakern.store import Entry
from mlakern.validation.backends import EmulatorBackend
from mlakern.validation.compare import Output
from mlakern.validation.problem import Problem, make_problem
from mlakern.validation.spec import ProblemSpec

CONFIG = KernelConfig(mask="plain")
NEEDED = (
    "fence.mbarrier_init",
    "fence.proxy.async",
    "tcgen05.wait::st",
    "tcgen05.commit",
    "mbarrier.arrive.expect_tx",
)


@dataclass(frozen=True)
class Altered:
    """An entry of the store with other PTX."""

    manifest: Manifest
    text: str

    def load_ptx(self) -> str:
        return self.text

    def load_cubin(self, driver_version: int | None = None) -> bytes:
        raise NotImplementedError(driver_version)


@pytest.fixture(scope="module")
def entry(find_kernel: Callable[[KernelConfig], Entry]) -> Entry:
    return find_kernel(CONFIG)


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Several key tiles in one run, the last one partly filled, the maximum rising."""
    spec = ProblemSpec(num_heads=128, seq_lens=(700,), splits=1, values="ramp")
    return make_problem(spec, CONFIG, spec.plan(CONFIG, multiprocessors=148))


def run(entry: Entry, text: str, problem: Problem, **options: int) -> Output:
    return EmulatorBackend(races=True, **options).execute(Altered(entry.manifest, text), problem)


def attention_lines(text: str) -> range:
    """Line numbers (from 0) of the attention kernel."""
    lines = text.splitlines()
    entries = [number for number, line in enumerate(lines) if ".visible .entry" in line]
    first = next(number for number in entries if "attention" in lines[number])
    return range(first, next((n for n in entries if n > first), len(lines)))


def test_no_races_in_any_schedule(entry: Entry, problem: Problem) -> None:
    expected = run(entry, entry.load_ptx(), problem)
    for seed in range(3):
        output = run(entry, entry.load_ptx(), problem, delay_seed=seed)
        np.testing.assert_array_equal(output.out, expected.out)


@pytest.mark.parametrize("opcode", NEEDED)
def test_every_removal_is_noticed(entry: Entry, problem: Problem, opcode: str) -> None:
    text = entry.load_ptx()
    lines = text.splitlines()
    chosen = [n for n in attention_lines(text) if re.match(rf"\s*{re.escape(opcode)}\b", lines[n])]
    assert chosen
    for number in chosen:
        altered = "\n".join([*lines[:number], "", *lines[number + 1 :]])
        with pytest.raises(EmulatorError) as caught:
            run(entry, altered, problem)
        # An arrival that is missing stops the kernel; a fence or a wait leaves a race.
        waits = "arrive" in opcode or "commit" in opcode
        assert isinstance(caught.value, DeadlockError if waits else RaceError), lines[number]
