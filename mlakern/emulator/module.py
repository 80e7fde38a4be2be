"""A PTX module and its launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlakern.emulator.codegen import Code, Variant
from mlakern.emulator.cta import Cluster
from mlakern.emulator.errors import EmulatorError
from mlakern.emulator.launch import Launch, LaunchReport, Options, Size, machine_of
from mlakern.emulator.memory import GlobalMemory
from mlakern.emulator.program import Entry, Program
from mlakern.emulator.ptx import parse
from mlakern.tensormap import TensorMap

if TYPE_CHECKING:
    from mlakern.emulator.observer import Observer


class Module:
    """Parsed PTX. Code is generated when it is first run and kept for later launches."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._code: dict[str, Code] = {}

    @classmethod
    def from_ptx(cls, text: str) -> Module:
        """Parse PTX text. Raises PtxError, with the line, for what the emulator does not know."""
        return cls(parse(text))

    @property
    def entries(self) -> dict[str, Entry]:
        """The kernels, by name."""
        return self.program.entries

    def launch(
        self,
        entry_name: str,
        grid: Size,
        block: Size,
        *,
        memory: GlobalMemory,
        parameters: Sequence[bytes | TensorMap] = (),
        cluster: Size = (1, 1, 1),
        dynamic_shared: int = 0,
        options: Options | None = None,
        observer: Observer | None = None,
    ) -> LaunchReport:
        """Run a kernel to its end, one cluster after the other.

        parameters: for each kernel parameter in order its little-endian bytes, or a TensorMap.
        observer: is told of accesses and synchronisation; ``Options(races=True)`` makes one that
        looks for races. Raises EmulatorError for whatever hardware leaves undefined and
        DeadlockError (one of them) when nothing can run.
        """
        if entry_name not in self.entries:
            known = ", ".join(self.entries)
            raise EmulatorError(f"launch: no kernel {entry_name}; this module has: {known}")
        code = self._code.get(entry_name)
        if code is None:
            code = self._code[entry_name] = Code(self.entries[entry_name])
        options = options or Options()
        if options.races and observer is None:
            from mlakern.emulator.races import RaceDetector

            observer = RaceDetector()
        launch = Launch(
            code,
            grid,
            block,
            cluster,
            dynamic_shared,
            parameters,
            memory,
            self._place_variables(code.entry, memory),
            options,
            observer,
            machine_of(self.program.target),
        )
        before = {variant: variant.hits for variant in code.variants.values()}
        count = 0
        with np.errstate(all="ignore"):
            while (index := launch.take_cluster()) is not None:
                _run(launch, index)
                count += 1
        return _report(code, before, count)

    def _place_variables(self, entry: Entry, memory: GlobalMemory) -> dict[str, int]:
        """Put the module's const and global variables that a kernel names into global memory."""
        places: dict[str, int] = {}
        for variable in entry.variables.values():
            if variable.space not in ("const", "global"):
                continue
            try:
                places[variable.name] = memory.address(variable.name)
            except KeyError:
                data = np.zeros(variable.size, np.uint8)
                data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
                places[variable.name] = memory.add(
                    variable.name, data, writable=variable.space == "global"
                )
        return places


def _run(launch: Launch, index: Size) -> None:
    observer = launch.observer
    if observer is not None:
        observer.begin(launch.cluster_size, launch.warps, launch.shared_bytes)
    Cluster(launch, index).run()
    if observer is not None:
        observer.end()


def _report(code: Code, before: dict[Variant, int], clusters: int) -> LaunchReport:
    opcodes: Counter[str] = Counter()
    for variant in code.variants.values():
        hits = variant.hits - before.get(variant, 0)
        if hits:
            for instruction in variant.instructions:
                opcodes[instruction.row.name] += hits
    return LaunchReport(code.entry.name, clusters, opcodes.total(), opcodes)
