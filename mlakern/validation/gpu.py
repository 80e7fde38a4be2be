"""Problems on a real device: memory from the driver, the runtime's own launches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlakern.config import KernelConfig
from mlakern.runtime import driver
from mlakern.validation.backends import Entry, launches_of, output_of
from mlakern.validation.buffers import Buffer
from mlakern.validation.compare import Output
from mlakern.validation.problem import Problem


@dataclass(frozen=True)
class GpuBackend:
    """The cubin of an entry on device `device`."""

    device: int = 0

    @property
    def name(self) -> str:
        return "gpu"

    @property
    def multiprocessors(self) -> int:
        return driver.multiprocessors(self.device)

    def unavailable_reason(self, config: KernelConfig) -> str | None:
        """Without a driver, a device, or a device of the configuration's architecture."""
        return cannot_run_reason(config.arch, self.device)

    def execute(self, entry: Entry, problem: Problem) -> Output:
        """Copies the problem to the device, launches, waits and copies the results back."""
        with driver.device_context(self.device):
            return self._execute(entry, problem)

    def _execute(self, entry: Entry, problem: Problem) -> Output:
        library = driver.Library(entry.load_cubin(driver.driver_version()))
        device = f"cuda:{self.device}"
        addresses: dict[str, int] = {}
        try:
            for buffer in problem.buffers:
                addresses[buffer.name] = _upload(buffer)
            for launch in launches_of(entry.manifest, problem, addresses, device):
                kernel = library.kernel(launch.entry)
                kernel.reserve_shared(launch.dynamic_shared)
                kernel.prepare(launch, stream=0).enqueue()
            driver.synchronize()
            images = {
                b.name: _download(addresses[b.name], b) for b in problem.buffers if b.writable
            }
        finally:
            for address in addresses.values():
                driver.free(address)
        return output_of(problem, images)


def cannot_run_reason(arch: str, device: int = 0) -> str | None:
    """Why this machine's device cannot run a cubin of `arch`; None if it can."""
    try:
        if driver.device_count() == 0:
            return "no CUDA device"
        found = driver.architecture(device)
    except driver.DriverError as error:
        return str(error)
    if found != arch:
        return f"device {device} is {found}, the kernel is for {arch}"
    return None


def _upload(buffer: Buffer) -> int:
    address = driver.allocate(max(1, buffer.image.nbytes))
    driver.copy_to_device(address, buffer.image.ctypes.data, buffer.image.nbytes)
    return address


def _download(address: int, buffer: Buffer) -> NDArray[np.uint8]:
    image = np.empty_like(buffer.image)
    driver.copy_to_host(image.ctypes.data, address, image.nbytes)
    return image
