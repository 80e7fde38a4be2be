"""One launch: the grid, the parameters, and everything that its clusters share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from mlakern.emulator import tensormap_image
from mlakern.emulator.errors import EmulatorError
from mlakern.emulator.memory import GlobalMemory, Store
from mlakern.tensormap import TensorMap

if TYPE_CHECKING:
    from mlakern.emulator.codegen import Code
    from mlakern.emulator.observer import Observer

Size = tuple[int, int, int]
WARP = 32
MAX_THREADS = 1024
MAX_CLUSTER = 16


@dataclass(frozen=True)
class Machine:
    """What differs between architectures: sizes of a CTA's memories, descriptor addresses.

    shared_bytes: with the 1024 that the system reserves.
    """

    shared_bytes: int = 228 * 1024
    tensor_columns: int = 512
    sm_107: bool = False


# The shared memory of sm_107 is what its 15-bit descriptor addresses reach (inferred).
_MACHINES = {"sm_107": Machine(512 * 1024, 576, sm_107=True)}


def machine_of(target: str) -> Machine:
    """The machine that a PTX target names."""
    return _MACHINES.get(target.rstrip("af"), Machine())


@dataclass(frozen=True)
class Options:
    """How a launch is executed.

    races: run the race detector. delay: complete asynchronous work late and shuffle the schedule,
    both determined by ``seed``. seed alone shuffles only the schedule. poison: registers and
    memory that were never written may be read, all their bits are ones (a NaN); some kernels
    compute with such values and then drop the results.
    """

    races: bool = False
    seed: int | None = None
    delay: bool = False
    poison: bool = False

    @property
    def shuffles(self) -> bool:
        return self.delay or self.seed is not None


@dataclass(frozen=True)
class LaunchReport:
    """What a launch executed. opcodes: warp instructions by opcode."""

    entry: str
    clusters: int
    warp_instructions: int
    opcodes: Counter[str] = field(default_factory=Counter)


class Launch:
    """A kernel with its grid and arguments, checked."""

    def __init__(
        self,
        code: Code,
        grid: Size,
        block: Size,
        cluster: Size,
        dynamic_shared: int,
        parameters: Sequence[bytes | TensorMap],
        memory: GlobalMemory,
        symbols: dict[str, int],
        options: Options,
        observer: Observer | None,
        machine: Machine,
    ) -> None:
        self.code = code
        self.entry = code.entry
        self.grid, self.block, self.cluster = grid, block, cluster
        self.dynamic_shared = dynamic_shared
        self.memory = memory
        self.symbols = symbols
        self.options = options
        self.observer = observer
        self.machine = machine
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // WARP)
        self.threads_rounded = self.warps * WARP
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.cta_count = grid[0] * grid[1] * grid[2]
        self.shared_bytes = code.places.dynamic + dynamic_shared
        self.widths = [register.width for register in self.entry.registers]
        self._specials: dict[tuple[str, int, int], Any] = {}
        self._check()
        self.clusters = tuple(g // c for g, c in zip(grid, cluster, strict=True))
        x, y, z = (range(count) for count in self.clusters)
        self._waiting = ((i, j, k) for k, j, i in product(z, y, x))
        self.tensor_maps: dict[int, TensorMap] = {}
        self.parameters = Store(self._pack(parameters), "parameter")

    def take_cluster(self) -> Size | None:
        """The index of the next cluster that has not begun, x fastest; None when all have."""
        return next(self._waiting, None)

    def _check(self) -> None:
        name = self.entry.name
        if not 1 <= self.threads <= MAX_THREADS:
            raise EmulatorError(
                f"launch of {name}: {self.threads} threads, need 1 to {MAX_THREADS}"
            )
        required = self.entry.reqntid
        if required is not None and required != self.block:
            raise EmulatorError(f"launch of {name}: block {self.block}, .reqntid is {required}")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise EmulatorError(
                f"launch of {name}: grid {self.grid} is not a multiple of cluster {self.cluster}"
            )
        wanted = self.entry.reqnctapercluster
        if wanted is not None and wanted != self.cluster:
            raise EmulatorError(
                f"launch of {name}: cluster {self.cluster}, .reqnctapercluster is {wanted}"
            )
        if self.cluster_size > MAX_CLUSTER:
            raise EmulatorError(f"launch of {name}: {self.cluster_size} CTAs a cluster, at most 16")
        if self.shared_bytes > self.machine.shared_bytes:
            raise EmulatorError(
                f"launch of {name}: {self.shared_bytes} bytes of shared memory with the "
                f"1024 reserved ones, at most {self.machine.shared_bytes}"
            )

    def _pack(self, values: Sequence[bytes | TensorMap]) -> Any:
        declared = self.entry.parameters
        if len(values) != len(declared):
            raise EmulatorError(
                f"launch of {self.entry.name}: got {len(values)} parameters, need {len(declared)}"
            )
        data = np.zeros(-(-self.entry.parameter_bytes // 16) * 16, np.uint8)
        for number, (value, parameter) in enumerate(zip(values, declared, strict=True)):
            if isinstance(value, TensorMap):
                self.tensor_maps[parameter.offset] = value
                value = tensormap_image.encode(value)
            if len(value) != parameter.size:
                raise EmulatorError(
                    f"launch of {self.entry.name}: parameter {number} has {len(value)} bytes, "
                    f"need {parameter.size}"
                )
            end = parameter.offset + parameter.size
            data[parameter.offset : end] = np.frombuffer(value, np.uint8)
        return data

    def special(self, name: str, first: int, size: int) -> Any:
        """A per-lane special register of threads [first, first + size)."""
        key = name, first, size
        found = self._specials.get(key)
        if found is None:
            threads = np.arange(first, first + size)
            found = self._specials[key] = self._special(name, threads).astype(np.uint32)
        return found

    def _special(self, name: str, threads: Any) -> Any:
        x, y, _ = self.block
        lane = (threads % WARP).astype(np.uint64)
        one, full = np.uint64(1), np.uint64((1 << WARP) - 1)
        return {
            "tid.x": lambda: threads % x,
            "tid.y": lambda: threads // x % y,
            "tid.z": lambda: threads // (x * y),
            "laneid": lambda: lane,
            "warpid": lambda: threads // WARP,
            "lanemask_eq": lambda: one << lane,
            "lanemask_lt": lambda: (one << lane) - one,
            "lanemask_le": lambda: (one << (lane + one)) - one,
            "lanemask_gt": lambda: ~((one << (lane + one)) - one) & full,
            "lanemask_ge": lambda: ~((one << lane) - one) & full,
        }[name]()
