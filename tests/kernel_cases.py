"""Problems for the kernel tests: a configuration, a shape and what the case is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mlakern.config import KernelConfig
from mlakern.runtime.arguments import Scalars
from mlakern.store import Entry
from mlakern.validation.backends import EmulatorBackend
from mlakern.validation.compare import Output
from mlakern.validation.problem import Problem, make_problem
from mlakern.validation.run import validate
from mlakern.validation.spec import MODEL_SCALE, ProblemSpec

Find = Callable[[KernelConfig], Entry]


def scalars(**changes: Any) -> Scalars:
    return replace(Scalars(MODEL_SCALE), **changes)


@dataclass(frozen=True)
class Case:
    """A problem for a configuration; `what` it is there for is its name."""

    what: str
    config: KernelConfig = field(default_factory=KernelConfig)
    heads: int = 16
    tokens: int = 1
    lengths: tuple[int, ...] = (130, 300)
    splits: int | None = 1
    more: dict[str, Any] = field(default_factory=dict)
    multiprocessors: int = 148
    races: bool = False
    seed: int | None = None

    @property
    def spec(self) -> ProblemSpec:
        return ProblemSpec(
            num_heads=self.heads,
            seq_len_q=self.tokens,
            seq_lens=self.lengths,
            splits=None if self.config.schedule == "work_list" else self.splits,
            **self.more,
        )

    @property
    def backend(self) -> EmulatorBackend:
        return EmulatorBackend(self.races, self.seed, self.multiprocessors)

    def problem(self) -> Problem:
        return make_problem(
            self.spec, self.config, self.spec.plan(self.config, self.multiprocessors)
        )

    def check(self, find_kernel: Find) -> None:
        """Against both references."""
        report = validate(find_kernel(self.config), self.spec, self.backend)
        assert report.status == "pass", report.reason
        assert {m.name for m in report.errors} >= {"poisoned_memory", "written_outside_rows"}

    def run(self, find_kernel: Find) -> Output:
        return self.backend.execute(find_kernel(self.config), self.problem())
