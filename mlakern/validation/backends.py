"""Where a problem runs: the emulator or a GPU, behind one small interface.

Both get the launches of mlakern.runtime.arguments for tensors at their own addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlakern.config import KernelConfig
from mlakern.manifest import Manifest
from mlakern.runtime.arguments import Launch, Tensors, build_launches
from mlakern.validation.buffers import Buffer
from mlakern.validation.compare import Output
from mlakern.validation.problem import Problem

# Bases that are far apart, above 2^32 and not round: address arithmetic in 32 bits must show.
_FIRST_ADDRESS = 0x7_3456_7000
_SPACING = 1 << 20

Images = Mapping[str, NDArray[np.uint8]]


class Entry(Protocol):
    """What a backend takes from the store."""

    @property
    def manifest(self) -> Manifest: ...
    def load_cubin(self, driver_version: int | None = None) -> bytes: ...
    def load_ptx(self) -> str: ...


class Backend(Protocol):
    """Runs problems. multiprocessors: what the planner is told, once the backend is available."""

    @property
    def name(self) -> str: ...
    @property
    def multiprocessors(self) -> int: ...
    def unavailable_reason(self, config: KernelConfig) -> str | None:
        """Why this machine cannot run the configuration; None if it can."""

    def execute(self, entry: Entry, problem: Problem) -> Output:
        """One decode call."""


@dataclass(frozen=True)
class EmulatorBackend:
    """The PTX of an entry, executed on the CPU.

    races: with the race detector. delay_seed: delays asynchronous work and shuffles the warps by
    this seed; None: neither.
    """

    races: bool = False
    delay_seed: int | None = None
    multiprocessors: int = 148

    @property
    def name(self) -> str:
        return "emulator"

    def unavailable_reason(self, config: KernelConfig) -> str | None:  # noqa: ARG002
        """None: any machine runs any kernel."""
        return None

    def execute(self, entry: Entry, problem: Problem) -> Output:
        """The launches one after the other; EmulatorError for a fault of the kernel."""
        from mlakern.emulator import GlobalMemory, Options

        memory = GlobalMemory()
        addresses = place(problem.buffers)
        images: dict[str, NDArray[np.uint8]] = {}
        for buffer in problem.buffers:
            image = buffer.image.copy() if buffer.writable else buffer.image
            images[buffer.name] = image
            for start, stop in mapped_ranges(buffer):
                memory.add(
                    f"{buffer.name}[{start}:{stop}]",
                    image[start:stop],
                    writable=buffer.writable,
                    address=addresses[buffer.name] + start,
                )
        module = _parsed(entry.load_ptx())
        options = Options(races=self.races, seed=self.delay_seed, delay=self.delay_seed is not None)
        for launch in launches_of(entry.manifest, problem, addresses, "cuda:0"):
            module.launch(
                launch.entry,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                dynamic_shared=launch.dynamic_shared,
                parameters=list(launch.parameters),
                memory=memory,
                options=options,
            )
        return output_of(problem, images)


def place(buffers: tuple[Buffer, ...]) -> dict[str, int]:
    """An address for each buffer, far from each other."""
    addresses = {}
    cursor = _FIRST_ADDRESS
    for buffer in buffers:
        addresses[buffer.name] = cursor
        cursor += -(-buffer.image.nbytes // _SPACING) * _SPACING + _SPACING
    return addresses


def mapped_ranges(buffer: Buffer) -> list[tuple[int, int]]:
    """The pieces as byte ranges that start at multiples of 16 and do not overlap."""
    ranges: list[tuple[int, int]] = []
    for piece in buffer.pieces:
        start, stop, _ = piece.indices(len(buffer.image))
        start -= start % 16
        if ranges and start < ranges[-1][1]:
            start, _ = ranges.pop()
        ranges.append((start, stop))
    return ranges


def launches_of(
    manifest: Manifest, problem: Problem, addresses: Mapping[str, int], device: str
) -> tuple[Launch, ...]:
    """The runtime's launches for a problem whose buffers lie at these addresses."""
    views = {
        name: field.view(addresses[field.buffer.name], device)
        for name, field in problem.fields.items()
    }
    return build_launches(
        manifest, problem.plan, Tensors(**views), problem.spec.scalars, device=device
    )


def output_of(problem: Problem, images: Images) -> Output:
    """What a run left in the images of the writable buffers."""
    out = problem.fields["out"]
    lse = problem.fields.get("lse")
    return Output(
        out=out.array(images["out"]).copy(),
        out_dtype=out.dtype,
        lse=lse.array(images["lse"]).copy() if lse is not None else None,
        stray_bytes=_stray_bytes(problem, images["out"]),
    )


def _stray_bytes(problem: Problem, image: NDArray[np.uint8]) -> int:
    """Bytes outside the rows of out that are no longer what they were."""
    out = problem.fields["out"]
    before = out.buffer.image.copy()
    after = image.copy()
    out.array(before)[...] = 0
    out.array(after)[...] = 0
    return int(np.count_nonzero(before != after))


@lru_cache(maxsize=8)
def _parsed(ptx: str) -> Any:
    """The parsed module: generated code is kept for the next problem of the same kernel."""
    from mlakern.emulator import Module

    return Module.from_ptx(ptx)
