"""The driver module against recorded driver calls: what is handed over, and how failures read."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from manifests import sample_manifest

from mlakern.config import KernelConfig
from mlakern.runtime import api, driver
from mlakern.runtime.arguments import Launch
from mlakern.runtime.arrays import ArrayView
from mlakern.runtime.decode import load
from mlakern.tensormap import Swizzle, TensorMap
from mlakern.validation.gpu import cannot_run_reason

OK = cuda.CUresult.CUDA_SUCCESS
CACHES = (
    driver.architecture,
    driver.multiprocessors,
    driver.encoded,
    driver._launch_attributes,
    driver._primary_context,
)


class Recorder:
    """The names of cuda.bindings.driver, with the calls that reach a device replaced."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.encoded: list[dict[str, Any]] = []
        self.shared: list[int] = []
        self.capability = (10, 0)
        self.capturing = False
        self.contexts: list[str] = []
        self.sizes: list[int] = []  # of the next launch's parameters

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and not name.startswith("cuuint"):
            raise AssertionError(f"unexpected driver call {name}")
        return getattr(cuda, name)

    def cuCtxGetCurrent(self) -> Any:  # noqa: N802 (the driver's names)
        return OK, cuda.CUcontext(1)

    def cuCtxGetDevice(self) -> Any:  # noqa: N802
        return OK, 0

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return OK, 13000

    def cuDevicePrimaryCtxRetain(self, ordinal: int) -> Any:  # noqa: N802
        self.contexts.append(f"retain {ordinal}")
        return OK, f"primary {ordinal}"

    def cuCtxPushCurrent(self, context: str) -> Any:  # noqa: N802
        self.contexts.append(f"push {context}")
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:  # noqa: N802
        self.contexts.append("pop")
        return OK, "primary"

    def cuDeviceGetCount(self) -> Any:  # noqa: N802
        return OK, 2

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        return OK, ordinal

    def cuDeviceGetAttribute(self, attribute: Any, _: int) -> Any:  # noqa: N802
        names = cuda.CUdevice_attribute
        return OK, {
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.capability[0],
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.capability[1],
            names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 148,
        }[attribute]

    def cuLibraryLoadData(self, code: bytes, *_: Any) -> Any:  # noqa: N802
        return (OK, "library") if code == b"cubin" else (cuda.CUresult(200), None)

    def cuLibraryGetKernel(self, _: Any, entry: bytes) -> Any:  # noqa: N802
        return OK, entry

    def cuKernelGetFunction(self, kernel: bytes) -> Any:  # noqa: N802
        return OK, kernel.decode()

    def cuFuncSetAttribute(self, _: Any, __: Any, value: int) -> Any:  # noqa: N802
        self.shared.append(value)
        return (OK,)

    def cuStreamIsCapturing(self, _: Any) -> Any:  # noqa: N802
        status = cuda.CUstreamCaptureStatus
        return OK, (
            status.CU_STREAM_CAPTURE_STATUS_ACTIVE
            if self.capturing
            else status.CU_STREAM_CAPTURE_STATUS_NONE
        )

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> Any:  # noqa: N802
        self.encoded.append(arguments)  # type: ignore[arg-type]
        encoded = cuda.CUtensorMap()
        encoded.opaque = [cuda.cuuint64_t(i * 0x0101010101010101) for i in range(16)]
        return OK, encoded

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: int, _: int) -> Any:  # noqa: N802
        table = (ctypes.c_void_p * len(self.sizes)).from_address(pointers)
        values = [ctypes.string_at(p, n) for p, n in zip(table, self.sizes, strict=True)]
        self.launches.append(
            {
                "function": function,
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "shared": config.sharedMemBytes,
                "stream": int(config.hStream),
                "attributes": [attribute.id for attribute in config.attrs],
                "cluster": [
                    (a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z)
                    for a in config.attrs
                    if a.id == cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                ],
                "values": values,
            }
        )
        return (OK,)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    monkeypatch.setattr(driver, "bindings", lambda: made)
    for cached in CACHES:
        cached.cache_clear()
    yield made
    for cached in CACHES:
        cached.cache_clear()


MAP = TensorMap(0x1000, 1, (512, 64, 7), (576, 40000), (128, 64, 1), Swizzle.B128)


def test_a_tensor_map_is_encoded_field_by_field_and_once(recorder: Recorder) -> None:
    image = driver.encoded(MAP)
    assert image == b"".join(bytes([i]) * 8 for i in range(16))
    assert driver.encoded(MAP) == image
    ((kind, rank, address, extents, strides, box, steps, interleave, swizzle, _, fill),) = (
        recorder.encoded
    )
    assert kind == cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    assert (rank, address) == (3, 0x1000)
    assert [int(v) for v in extents] == [512, 64, 7]
    assert [int(v) for v in strides] == [576, 40000]
    assert [int(v) for v in box] == [128, 64, 1]
    assert [int(v) for v in steps] == [1, 1, 1]
    assert interleave == cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert swizzle == cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    # Zeros outside, not NaN.
    assert fill == cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_a_launch_hands_over_shape_stream_attributes_and_parameter_bytes(
    recorder: Recorder,
) -> None:
    kernel = driver.Library(b"cubin").kernel("entry")
    recorder.sizes = [128, 8, 4]
    shape = replace(sample_manifest().kernel("attention"), cluster=(2, 1, 1), dynamic_shared=200000)
    wide = Launch(shape, (2, 3, 4), (MAP, b"\x01" * 8, b"\x02" * 4), pdl=True)
    kernel.prepare(wide, stream=77).enqueue()
    recorder.sizes = []
    plain = replace(shape, block=(128, 1, 1), cluster=(1, 1, 1), dynamic_shared=0)
    kernel.prepare(Launch(plain, (1, 1, 1), ()), stream=0).enqueue()
    ids = cuda.CUlaunchAttributeID
    assert recorder.launches == [
        {
            "function": "entry",
            "grid": (2, 3, 4),
            "block": (384, 1, 1),
            "shared": 200000,
            "stream": 77,
            "attributes": [
                ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            ],
            "cluster": [(2, 1, 1)],
            "values": [driver.encoded(MAP), b"\x01" * 8, b"\x02" * 4],
        },
        {
            "function": "entry",
            "grid": (1, 1, 1),
            "block": (128, 1, 1),
            "shared": 0,
            "stream": 0,
            "attributes": [],
            "cluster": [],
            "values": [],
        },
    ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (None, "cuda.bindings: cannot be imported .*; try pip install 'cuda-bindings>=13,<14'"),
        ("missing", "CUDA driver: cannot be loaded: no libcuda"),
        ("old", "CUDA driver: cuInit failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_a_machine_without_a_driver_says_what_is_missing(
    broken: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bindings:
        CUresult = cuda.CUresult

        @staticmethod
        def cuInit(_: int) -> Any:  # noqa: N802
            if broken == "missing":
                raise RuntimeError("no libcuda")
            return (cuda.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,)

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", broken and Bindings)
    monkeypatch.setattr("cuda.bindings.driver", broken and Bindings)
    if broken is None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    driver.bindings.cache_clear()
    with pytest.raises(driver.DriverUnavailableError, match=message):
        driver.bindings()
    # What `mlakern run` prints on such a machine.
    assert re.search(message, cannot_run_reason("sm_100a") or "")
    driver.bindings.cache_clear()


@pytest.mark.usefixtures("recorder")
def test_a_gpu_runs_kernels_of_its_own_architecture_only() -> None:
    assert cannot_run_reason("sm_100a") is None
    assert cannot_run_reason("sm_103a") == "device 0 is sm_100a, the kernel is for sm_103a"


def test_a_bad_status_names_the_call_and_the_status(recorder: Recorder) -> None:
    with pytest.raises(driver.DriverError, match="cuLibraryLoadData: failed with CUDA_ERROR_INVAL"):
        driver.Library(b"not a cubin")
    assert recorder.launches == []


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((8, 0), "sm_80")],
)
def test_architectures(recorder: Recorder, capability: tuple[int, int], name: str) -> None:
    recorder.capability = capability
    assert driver.architecture(0) == name


class Store:
    """Serves one made-up kernel for every configuration."""

    def __init__(self) -> None:
        self.loaded = 0

    def find(self, config: KernelConfig) -> Any:
        self.manifest = sample_manifest(config)
        return self

    def load_cubin(self, driver_version: int | None = None) -> bytes:
        assert driver_version == 13000
        self.loaded += 1
        return b"cubin"


def test_load_reserves_shared_memory_of_every_kernel(recorder: Recorder) -> None:
    decode = load(Store(), KernelConfig())
    assert recorder.shared == [1000, 1000, 1000]
    assert decode.plan([8192], num_heads=16).splits == 32  # of 148 multiprocessors
    assert decode.device == 0


def test_a_kernel_for_another_architecture_is_refused(recorder: Recorder) -> None:
    recorder.capability = (9, 0)
    with pytest.raises(ValueError, match="config: got a kernel for sm_100a, need one for sm_90a"):
        load(Store(), KernelConfig())


def test_loading_on_another_device_leaves_the_current_context_as_it_was(
    recorder: Recorder,
) -> None:
    load(Store(), KernelConfig(), device=0)
    assert recorder.contexts == []
    for _ in range(2):
        assert load(Store(), KernelConfig(), device=1).device == 1
    assert recorder.contexts == ["retain 1", "push primary 1", "pop", "push primary 1", "pop"]


def test_a_device_that_does_not_exist(recorder: Recorder) -> None:
    with pytest.raises(driver.DriverUnavailableError, match="device: got 3, need one of 2 devices"):
        load(Store(), KernelConfig(), device=3)
    assert recorder.shared == []


def gpu_arrays(**changes: Any) -> dict[str, Any]:
    def view(*shape: int, dtype: str = "uint8") -> ArrayView:
        return gpu_view(shape, dtype)

    arrays: dict[str, Any] = {
        "query": view(2, 4, 96, 576),
        "kv_cache": view(9, 1, 64, 576),
        "workspace_buffer": view(1 << 24),
        "block_tables": view(2, 5, dtype="int32"),
        "seq_lens": view(2, dtype="int32"),
        "max_seq_len": 300,
        "softmax_scale": 0.1,
        "out": view(2, 4, 96, 512, dtype="bfloat16"),
    }
    return {**arrays, **changes}


def gpu_view(shape: tuple[int, ...], dtype: str) -> ArrayView:
    return ArrayView.dense(1 << 20, shape, dtype, "cuda:0")


@pytest.fixture
def preloaded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """mla_decode with a store that has every kernel."""
    store = Store()
    monkeypatch.setattr("mlakern.store.open_store", lambda: store)
    monkeypatch.setattr(api, "_loaded", {})
    yield recorder


def prepared_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Launch, int]]:
    """The launches that are enqueued from now on, with their streams."""
    enqueued: list[tuple[Launch, int]] = []

    class Prepared:
        def __init__(self, _: Any, launch: Launch, stream: int) -> None:
            self.call = launch, stream

        def enqueue(self) -> None:
            enqueued.append(self.call)

    monkeypatch.setattr(driver, "PreparedLaunch", Prepared)
    return enqueued


@pytest.mark.usefixtures("preloaded")
def test_mla_decode_chooses_the_kernel_and_launches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prepared_launches(monkeypatch)
    arguments = gpu_arrays()
    assert api.mla_decode(**arguments, stream=5) is arguments["out"]
    ((config, device),) = api._loaded
    # 96 heads and 4 tokens: 3 packed tiles against 4 folded ones.
    assert config == KernelConfig(page_size=64, pack_q=True)
    assert device == 0
    assert [(launch.entry, launch.grid, stream) for launch, stream in seen] == [
        ("mla_attention", (6, 3, 2), 5),
        ("mla_combine", (384, 2, 1), 5),
    ]
    # Padded tokens cannot be packed: the folded kernel, not a copy.
    padded = ArrayView(
        1 << 20, (2, 4, 96, 576), (4 * 97 * 576, 97 * 576, 576, 1), "uint8", "cuda:0"
    )
    api.mla_decode(**gpu_arrays(query=padded), causal_mask=False, stream=5)
    assert list(api._loaded)[1][0] == KernelConfig(page_size=64, mask="plain")
    assert [launch.grid for launch, _ in seen[2:]] == [(8, 3, 2), (384, 2, 1)]


def words(launch: Launch) -> dict[str, int]:
    """The integers and addresses among a launch's parameters."""
    return {
        parameter.name: int.from_bytes(value, "little", signed=True)
        for parameter, value in zip(launch.kernel.parameters, launch.parameters, strict=True)
        if isinstance(value, bytes) and parameter.kind != "float32"
    }


@pytest.mark.usefixtures("preloaded")
def test_mla_decode_passes_masks_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prepared_launches(monkeypatch)

    def called(**changes: Any) -> tuple[str, dict[str, int]]:
        seen.clear()
        api.mla_decode(**gpu_arrays(**changes), stream=5)
        (config, _) = list(api._loaded)[-1]
        return config.mask, words(seen[0][0])

    mask, got = called(window_left=300, causal_mask=False)
    assert (mask, got["window_left"], got["window_causal"]) == ("window", 300, 0)
    mask, got = called(window_left=300)
    assert (mask, got["window_causal"]) == ("window", 1)
    lengths = ArrayView.dense(0x7000, (2,), "int32", "cuda:0")
    mask, got = called(cp_world=4, cp_rank=3, cp_interleave_size=64, causal_seqs=lengths)
    assert mask == "dcp"
    assert [got[n] for n in ("causal_seqs", "cp_world", "cp_rank", "cp_interleave")] == [
        0x7000, 4, 3, 64,
    ]  # fmt: skip
    visible = ArrayView.dense(0x8000, (2, 4), "int32", "cuda:0")
    mask, got = called(local_visible_lens=visible)
    assert (mask, got["local_visible_lens"]) == ("visible", 0x8000)


@pytest.mark.usefixtures("recorder")
def test_a_loaded_kernel_plans_on_the_device_unless_given_a_work_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = prepared_launches(monkeypatch)
    decode = load(Store(), KernelConfig(schedule="work_list", mask="plain"))
    plan = decode.plan([300, 9], num_heads=96, seq_len_q=4)
    arguments = gpu_arrays()
    del arguments["workspace_buffer"], arguments["max_seq_len"]
    workspace = gpu_view((plan.workspace_size,), "uint8")
    decode(**arguments, plan=plan, workspace=workspace, enable_pdl=True, stream=3)
    listed = ArrayView.dense(0x9000, (plan.work_list_words,), "int32", "cuda:0")
    decode(**arguments, plan=plan, workspace=workspace, work_list=listed, stream=3)
    assert [launch.kernel.role for launch, _ in seen] == [
        "planner", "attention", "combine", "attention", "combine",
    ]  # fmt: skip
    assert [launch.pdl for launch, _ in seen] == [True] * 3 + [False] * 2
    assert [words(launch)["work_list"] for launch, _ in seen[3:]] == [0x9000] * 2
    with pytest.raises(ValueError, match="causal_mask: got True, need False for a kernel of mask"):
        decode(**arguments, plan=plan, workspace=workspace, causal_mask=True)


def test_mla_decode_does_not_load_under_capture(preloaded: Recorder) -> None:
    preloaded.capturing = True
    with pytest.raises(RuntimeError, match=r"not loaded yet.*call mlakern.preload\(\[config\]\)"):
        api.mla_decode(**gpu_arrays(), stream=5)
    assert preloaded.launches == []


def test_preloaded_kernels_serve_under_capture(
    preloaded: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prepared_launches(monkeypatch)
    api.preload([KernelConfig(pack_q=True)])
    preloaded.capturing = True
    api.mla_decode(**gpu_arrays(), stream=5)
    assert len(seen) == 2


def test_a_call_is_checked_and_packed_once_for_the_same_arguments(
    preloaded: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prepared_launches(monkeypatch)
    for _ in range(3):
        api.mla_decode(**gpu_arrays(), stream=5)
    assert len(seen) == 6
    assert seen[4][0] is seen[0][0]
    api.mla_decode(**gpu_arrays(softmax_scale=0.2), stream=5)
    api.mla_decode(**gpu_arrays(), stream=6)
    # Another scale or stream is another call.
    scale = [p.name for p in seen[0][0].kernel.parameters].index("softmax_scale_log2")
    assert seen[6][0].parameters[scale] != seen[0][0].parameters[scale]
    assert [stream for _, stream in seen] == [5] * 8 + [6] * 2
    assert preloaded.launches == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank: got 256, need 512"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim: got 32, need 64"),
        ({"max_seq_len": None}, "max_seq_len: got none, need a number"),
        ({"softmax_scale": None}, "softmax_scale: got none, need a number"),
        ({"out": None}, "out: got none, need an array of shape [2, 4, 96, 512]"),
        ({"return_lse": True}, "lse: got none, need an array of shape [2, 4, 96] and type float32"),
        ({"window_left": 2}, "window_left: got 2 with seq_len_q 4, need >= 3"),
        ({"window_left": -3}, "window_left: got -3, need 0 to"),
        ({"cp_world": 2}, "causal_seqs: got none, need [2] int32 for mask dcp"),
        ({"cp_world": 2, "causal_mask": False}, "causal_mask: got False, need True for a kernel"),
        (
            {"local_visible_lens": gpu_view((2,), "int32")},
            "local_visible_lens: got shape [2], need",
        ),
        ({"window_left": 9, "cp_world": 2}, "mask: got window and dcp in one call"),
        ({"cp_world": 2, "cp_rank": 2}, "cp_rank: got 2 of cp_world 2"),
        ({"query": gpu_view((4, 96, 576), "uint8")}, "query: got shape [4, 96, 576], need"),
        ({"kv_cache": gpu_view((9, 64), "uint8")}, "kv_cache: got shape [9, 64], need"),
        ({"kv_cache": gpu_view((9, 48, 576), "uint8")}, "page_size: got 48, need one of 16"),
        ({"kv_cache": gpu_view((9, 64, 656), "uint8")}, "kv_cache: got rows of 656 bytes"),
        ({"workspace_buffer": None}, "workspace: got none, need"),
    ],
)
def test_mla_decode_refusals(preloaded: Recorder, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        api.mla_decode(**gpu_arrays(**changes), stream=5)
    assert str(error.value).startswith(message)
    assert preloaded.launches == []


def test_host_arrays_are_refused(preloaded: Recorder) -> None:
    import numpy as np

    with pytest.raises(ValueError, match="query: got device cpu, need a CUDA device"):
        api.mla_decode(**gpu_arrays(query=np.zeros((2, 1, 16, 576), np.uint8)))
    assert preloaded.launches == []
