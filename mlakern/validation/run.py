"""One validation: make a problem, run it, compare, report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mlakern.config import KernelConfig
from mlakern.reference import Numerics, exact, modelled
from mlakern.validation.backends import Backend, Entry
from mlakern.validation.compare import Measured, compare
from mlakern.validation.problem import Problem, make_problem
from mlakern.validation.spec import ProblemSpec

PASS, FAIL, UNAVAILABLE = "pass", "fail", "unavailable"


@dataclass(frozen=True)
class Report:
    """The outcome of one configuration on one problem; reason: why it failed or could not run.

    seconds: the run alone, references and comparison not counted.
    """

    config: KernelConfig
    backend: str
    spec: ProblemSpec
    status: str
    errors: tuple[Measured, ...] = field(default=())
    seconds: float = 0.0
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        document = {
            "config": self.config.as_dict(),
            "name": self.config.name,
            "backend": self.backend,
            "problem": self.spec.as_dict(self.config.mask),
            "status": self.status,
            "errors": {m.name: m.error for m in self.errors},
            "bounds": {m.name: m.bound for m in self.errors},
            "seconds": round(self.seconds, 4),
        }
        if self.reason:
            document["reason"] = self.reason
        return document


def validate(entry: Entry, spec: ProblemSpec, backend: Backend) -> Report:
    """Run `spec` on `entry` and compare with both references.

    A fault that the backend reports (a deadlock, a race, an access out of bounds, a driver error)
    is a failure with its text as the reason. Raises ValueError for a spec that the configuration
    does not take.
    """
    config = entry.manifest.config
    reason = backend.unavailable_reason(config)
    if reason:
        return Report(config, backend.name, spec, UNAVAILABLE, reason=reason)
    plan = spec.plan(config, backend.multiprocessors)
    try:
        problem = make_problem(spec, config, plan)
    except MemoryError:
        reason = f"no memory for {sum(spec.seq_lens)} keys; try shorter seq_lens"
        return Report(config, backend.name, spec, UNAVAILABLE, reason=reason)
    start = time.perf_counter()
    try:
        output = backend.execute(entry, problem)
    except _faults() as error:
        seconds = time.perf_counter() - start
        return Report(config, backend.name, spec, FAIL, seconds=seconds, reason=str(error))
    seconds = time.perf_counter() - start
    expected = modelled(problem.attention, numerics_of(problem), problem.division)
    errors = compare(output, exact(problem.attention), expected)
    status = PASS if all(m.passed for m in errors) else FAIL
    failed = ", ".join(f"{m.name} {m.error:.3g} > {m.bound:g}" for m in errors if not m.passed)
    return Report(config, backend.name, spec, status, errors, seconds, failed)


def numerics_of(problem: Problem) -> Numerics:
    """How the problem's kernel rounds."""
    scalars, config = problem.spec.scalars, problem.plan.config
    return Numerics(
        rescale_threshold=scalars.rescale_threshold,
        p_prescale_log2=scalars.p_prescale_log2,
        partial_dtype=config.partial_dtype,
        out_dtype=config.out_dtype,
    )


def _faults() -> tuple[type[Exception], ...]:
    """What a backend raises when the kernel, not the caller, is wrong."""
    from mlakern.emulator.errors import EmulatorError
    from mlakern.runtime.driver import DriverError

    return (EmulatorError, DriverError)
