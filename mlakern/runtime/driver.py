"""The CUDA driver: libraries, kernels, tensor maps, launches. The only module that calls it.

cuda.bindings and libcuda are loaded on first use. Every call goes through :func:`check`.
Source: CUDA Driver API, "Library Management", "Execution Control", "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from mlakern.manifest import Dim3
from mlakern.runtime.arguments import Launch
from mlakern.tensormap import Swizzle, TensorMap

_ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (10, 7): "sm_107a"}
# Tensor maps repeat from call to call (one set for each layer's cache); an encode costs some µs.
_ENCODED_MAPS = 4096


class DriverError(RuntimeError):
    """A driver call that failed, with its name and the driver's status."""


class DriverUnavailableError(DriverError):
    """No CUDA driver, or no device, on this machine."""


@cache
def bindings() -> Any:
    """The module cuda.bindings.driver, initialised; DriverUnavailableError if it cannot be."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverUnavailableError(
            f"cuda.bindings: cannot be imported ({error}); try pip install 'cuda-bindings>=13,<14'"
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # libcuda is missing
        raise DriverUnavailableError(f"CUDA driver: cannot be loaded: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverUnavailableError(f"CUDA driver: cuInit failed with {_status_name(status)}")
    return driver


def check(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a driver call's result (status, value…); DriverError if the status is bad."""
    status, *values = result
    if status != bindings().CUresult.CUDA_SUCCESS:
        raise DriverError(f"{call}: failed with {_status_name(status)}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _status_name(status: Any) -> str:
    return getattr(status, "name", str(status))


def driver_version() -> int:
    """The CUDA version that the driver supports, such as 13000."""
    return int(check("cuDriverGetVersion", bindings().cuDriverGetVersion()))


def device_count() -> int:
    return int(check("cuDeviceGetCount", bindings().cuDeviceGetCount()))


def current_device() -> int:
    """The ordinal of the current context's device; 0 if the thread has no context."""
    driver = bindings()
    if int(check("cuCtxGetCurrent", driver.cuCtxGetCurrent())) == 0:
        return 0
    return int(check("cuCtxGetDevice", driver.cuCtxGetDevice()))


@contextmanager
def device_context(ordinal: int) -> Iterator[None]:
    """A context of this device is current inside: the caller's if it is one, else the primary."""
    driver = bindings()
    if not 0 <= ordinal < device_count():
        raise DriverUnavailableError(f"device: got {ordinal}, need one of {device_count()} devices")
    context = check("cuCtxGetCurrent", driver.cuCtxGetCurrent())
    if int(context) and current_device() == ordinal:
        yield
        return
    check("cuCtxPushCurrent", driver.cuCtxPushCurrent(_primary_context(ordinal)))
    try:
        yield
    finally:
        check("cuCtxPopCurrent", driver.cuCtxPopCurrent())


@cache
def _primary_context(ordinal: int) -> Any:
    """Retained once, for the life of the process."""
    driver = bindings()
    device = check("cuDeviceGet", driver.cuDeviceGet(ordinal))
    return check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))


@cache
def architecture(ordinal: int) -> str:
    """Such as "sm_100a"; "sm_80" for a device that no kernel is made for."""
    names = bindings().CUdevice_attribute
    major = _attribute(ordinal, names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = _attribute(ordinal, names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    return _ARCHITECTURES.get((major, minor), f"sm_{major}{minor}")


@cache
def multiprocessors(ordinal: int) -> int:
    names = bindings().CUdevice_attribute
    return _attribute(ordinal, names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)


def _attribute(ordinal: int, attribute: Any) -> int:
    driver = bindings()
    device = check("cuDeviceGet", driver.cuDeviceGet(ordinal))
    value = check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, device))
    return int(value)


def is_capturing(stream: int) -> bool:
    """Whether a CUDA graph is being captured on the stream."""
    driver = bindings()
    status = check("cuStreamIsCapturing", driver.cuStreamIsCapturing(driver.CUstream(stream)))
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


class Library:
    """A cubin in the driver, for every context of the process, until the process ends."""

    def __init__(self, cubin: bytes) -> None:
        driver = bindings()
        result = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
        self._handle = check("cuLibraryLoadData", result)

    def kernel(self, entry: str) -> LoadedKernel:
        """The kernel with this entry name, loaded into the current context now."""
        driver = bindings()
        result = driver.cuLibraryGetKernel(self._handle, entry.encode())
        kernel = check(f"cuLibraryGetKernel({entry})", result)
        # Lazy loading would wait for the first launch, where a capture forbids it.
        function = check(f"cuKernelGetFunction({entry})", driver.cuKernelGetFunction(kernel))
        return LoadedKernel(self, function)


class LoadedKernel:
    """A kernel of the context that was current when it was loaded."""

    def __init__(self, library: Library, function: Any) -> None:
        self._library = library  # keeps the code loaded
        self._function = function

    def reserve_shared(self, dynamic_shared: int) -> None:
        """Allow launches with this much dynamic shared memory, in bytes."""
        driver = bindings()
        name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        result = driver.cuFuncSetAttribute(self._function, name, dynamic_shared)
        check(f"cuFuncSetAttribute(dynamic shared {dynamic_shared})", result)

    def prepare(self, launch: Launch, stream: int) -> PreparedLaunch:
        """Everything of a launch but the launch: cheap to repeat, and safe in any thread."""
        return PreparedLaunch(self._function, launch, stream)


class PreparedLaunch:
    """A launch with its parameters laid out in host memory. Nothing changes after it is made."""

    def __init__(self, function: Any, launch: Launch, stream: int) -> None:
        driver = bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.dynamic_shared
        config.hStream = driver.CUstream(stream)
        config.attrs = _launch_attributes(launch.cluster, launch.pdl)
        config.numAttrs = len(config.attrs)
        values = [p if isinstance(p, bytes) else encoded(p) for p in launch.parameters]
        self._storage = [ctypes.create_string_buffer(value, len(value)) for value in values]
        addresses = [ctypes.addressof(value) for value in self._storage]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._arguments = (config, function, ctypes.addressof(self._pointers), 0)
        self._enqueue = driver.cuLaunchKernelEx

    def enqueue(self) -> None:
        """Launch once; nothing is allocated or waited for on the device."""
        check("cuLaunchKernelEx", self._enqueue(*self._arguments))


@lru_cache(maxsize=32)
def _launch_attributes(cluster: Dim3, pdl: bool) -> list[Any]:
    driver = bindings()
    ids = driver.CUlaunchAttributeID
    attributes = []
    if cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = attribute.value.clusterDim
        dim.x, dim.y, dim.z = cluster
        attributes.append(attribute)
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    return attributes


@lru_cache(maxsize=_ENCODED_MAPS)
def encoded(tensor_map: TensorMap) -> bytes:
    """The 128 bytes of the CUtensorMap."""
    driver = bindings()
    swizzles = driver.CUtensorMapSwizzle
    types = driver.CUtensorMapDataType
    element_type = {
        1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2: types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4: types.CU_TENSOR_MAP_DATA_TYPE_UINT32,
        8: types.CU_TENSOR_MAP_DATA_TYPE_UINT64,
    }[tensor_map.element_bytes]
    swizzle = {
        Swizzle.NONE: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle.B32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle.B64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle.B128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[tensor_map.swizzle]
    result = driver.cuTensorMapEncodeTiled(
        element_type,
        tensor_map.rank,
        tensor_map.address,
        [driver.cuuint64_t(extent) for extent in tensor_map.extents],
        [driver.cuuint64_t(stride) for stride in tensor_map.strides],
        [driver.cuuint32_t(extent) for extent in tensor_map.box],
        [driver.cuuint32_t(1)] * tensor_map.rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    handle = check(f"cuTensorMapEncodeTiled({tensor_map})", result)
    words = [int(word) for word in handle.opaque]
    return b"".join(word.to_bytes(8, "little") for word in words)


def allocate(size: int) -> int:
    """Device memory of `size` bytes, not cleared; its address."""
    return int(check(f"cuMemAlloc({size})", bindings().cuMemAlloc(size)))


def free(address: int) -> None:
    check("cuMemFree", bindings().cuMemFree(address))


def copy_to_device(device_address: int, host_address: int, size: int) -> None:
    check("cuMemcpyHtoD", bindings().cuMemcpyHtoD(device_address, host_address, size))


def copy_to_host(host_address: int, device_address: int, size: int) -> None:
    check("cuMemcpyDtoH", bindings().cuMemcpyDtoH(host_address, device_address, size))


def synchronize() -> None:
    """Wait for the current context; a fault of an earlier launch shows here."""
    check("cuCtxSynchronize", bindings().cuCtxSynchronize())
