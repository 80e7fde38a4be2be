"""Foreign arrays and the layouts of engines, as views without a copy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from mlakern.runtime.arrays import ArrayView, as_view, dense_strides
from mlakern.runtime.layouts import cache_pair, query_pair
from mlakern.runtime.streams import stream_handle


def test_dlpack_view_of_a_strided_slice() -> None:
    base = np.zeros((4, 6, 10), np.float32)
    part = base[1:, ::2, 3:7]
    assert as_view("x", part) == ArrayView(
        part.ctypes.data, (3, 3, 4), (240, 80, 4), "float32", "cpu"
    )


@pytest.mark.parametrize(
    "name", ["uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bool"]
)
def test_dlpack_types(name: str) -> None:
    assert as_view("x", np.zeros(3, name)).dtype == name


def test_dlpack_gives_the_capsule_back() -> None:
    array = np.zeros(5, np.int32)
    before = sys.getrefcount(array)
    for _ in range(10):
        as_view("x", array)
    assert sys.getrefcount(array) == before


class Gpu:
    """A DLPack producer that stands on device 3 and records how it was asked."""

    def __init__(self, array: Any, device: tuple[int, int] = (2, 3)) -> None:
        self.array, self.device, self.streams = array, device, []  # type: ignore[var-annotated]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()


def test_dlpack_asks_a_gpu_producer_for_no_synchronisation() -> None:
    array = Gpu(np.zeros((2, 3), np.int32))
    assert as_view("x", array).device == "cuda:3"
    assert array.streams == [-1]
    assert as_view("x", Gpu(np.zeros(2), (10, 0))).device == "dlpack device type 10"


def test_dlpack_refusals_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"^seq_lens: got DLPack type code 5 with 64 bits"):
        as_view("seq_lens", np.zeros(2, np.complex64))
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: ndarray has no DLPack view"):
        as_view("out", frozen)
    with pytest.raises(ValueError, match=r"^lse: got list, need an array with __dlpack__"):
        as_view("lse", [1.0])


def test_torch_tensors_are_read_by_their_own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        shape, dtype, device = (2, 3), "torch.float8_e4m3fn", "cuda:1"

        def data_ptr(self) -> int:
            return 4096

        def stride(self) -> tuple[int, ...]:
            return (7, 1)

        def element_size(self) -> int:
            return 1

    torch = type("Torch", (), {"Tensor": Tensor})
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert as_view("x", Tensor()) == ArrayView(4096, (2, 3), (7, 1), "float8_e4m3fn", "cuda:1")
    assert as_view("x", np.zeros(3, np.int8)).dtype == "int8"


class CudaArray:
    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"version": 3, "strides": None, **interface}


def test_cuda_array_interface() -> None:
    dense = CudaArray(data=(4096, False), shape=(2, 3), typestr="<i4")
    assert as_view("x", dense) == ArrayView(4096, (2, 3), (12, 4), "int32", "cuda")
    strided = CudaArray(data=(64, True), shape=(2, 3), typestr="|u1", strides=(100, 2))
    assert as_view("x", strided) == ArrayView(64, (2, 3), (100, 2), "uint8", "cuda")
    with pytest.raises(ValueError, match=r"^x: got type string '<c8', need one of \|b1"):
        as_view("x", CudaArray(data=(0, False), shape=(2,), typestr="<c8"))


def test_views() -> None:
    view = ArrayView.dense(1000, (2, 3, 8), "bfloat16", "cuda:0")
    assert view.strides == dense_strides((2, 3, 8), 2) == (48, 16, 2)
    assert (view.nbytes, view.is_dense) == (96, True)
    tail = view.columns(5, 8)
    assert (tail.address, tail.shape, tail.is_dense) == (1010, (2, 3, 3), False)
    # The stride of a dimension of one element does not matter.
    assert ArrayView(0, (1, 4), (7, 4), "float32", "cpu").is_dense
    assert not ArrayView(0, (2, 4), (20, 4), "float32", "cpu").is_dense


def fp8(*shape: int, strides: tuple[int, ...] | None = None) -> ArrayView:
    return ArrayView(4096, shape, strides or dense_strides(shape, 1), "float8_e4m3fn", "cuda:0")


def test_query_rows_of_576_are_two_column_ranges() -> None:
    latent, rope = query_pair(fp8(2, 1, 16, 576))
    assert (latent.address, latent.shape) == (4096, (2, 1, 16, 512))
    assert (rope.address, rope.shape) == (4096 + 512, (2, 1, 16, 64))
    assert latent.strides == rope.strides == (16 * 576, 16 * 576, 576, 1)
    apart = fp8(2, 1, 16, 512), fp8(2, 1, 16, 64)
    assert query_pair(q_latent=apart[0], q_rope=apart[1]) == apart


@pytest.mark.parametrize(
    "cache",
    [
        fp8(7, 64, 576),
        fp8(7, 1, 64, 576),
        fp8(7, 64, 1, 576),
        # A padded dimension of one: its stride must not be taken for the row stride.
        fp8(7, 64, 1, 576, strides=(64 * 576, 576, 999999, 1)),
    ],
)
def test_cache_layouts_are_one(cache: ArrayView) -> None:
    latent, rope = cache_pair(cache, page_size=64)
    assert (latent.address, latent.shape) == (4096, (7, 64, 512))
    assert (rope.address, rope.shape) == (4096 + 512, (7, 64, 64))
    assert latent.strides == rope.strides == (64 * 576, 576, 1)


def test_separate_cache_tensors_and_padded_pools() -> None:
    latent, rope = fp8(7, 1, 32, 512, strides=(1 << 33, 0, 512, 1)), fp8(7, 32, 64)
    got = cache_pair(c_latent=latent, c_rope=rope, page_size=32)
    assert (got[0].shape, got[0].strides) == ((7, 32, 512), (1 << 33, 512, 1))
    assert got[1] == rope


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: query_pair(fp8(2, 16, 576)), "query: got shape [2, 16, 576], need [batch, seq_le"),
        (lambda: query_pair(fp8(2, 1, 16, 512)), "query: got shape [2, 1, 16, 512], need"),
        (lambda: query_pair(), "query: got none of them, need query alone or q_latent and q_rope"),
        (
            lambda: query_pair(fp8(2, 1, 16, 576), q_rope=fp8(2, 1, 16, 64)),
            "query: got query, q_rope, need query alone or q_latent and q_rope",
        ),
        (
            lambda: query_pair(q_latent=fp8(2, 1, 16, 512)),
            "query: got q_latent, need query alone or q_latent and q_rope",
        ),
        (
            lambda: cache_pair(fp8(7, 64, 656), page_size=64),
            "kv_cache: got rows of 656 bytes, the sparse FP8 format with block scales",
        ),
        (
            lambda: cache_pair(fp8(7, 64, 1, 656), page_size=64),
            "kv_cache: got rows of 656 bytes, the sparse FP8 format with block scales",
        ),
        (
            lambda: cache_pair(fp8(7, 64, 512), page_size=64),
            "kv_cache: got shape [7, 64, 512], need [pages, 64, 576]",
        ),
        (
            lambda: cache_pair(fp8(7, 32, 576), page_size=64),
            "kv_cache: got shape [7, 32, 576], need [pages, 64, columns]",
        ),
        (
            lambda: cache_pair(fp8(7, 2, 64, 576), page_size=64),
            "kv_cache: got shape [7, 2, 64, 576], need [pages, 64, columns]",
        ),
        (
            lambda: cache_pair(c_rope=fp8(7, 64, 64), page_size=64),
            "kv_cache: got c_rope, need kv_cache alone or c_latent and c_rope",
        ),
    ],
)
def test_refused_layouts(call: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(message)


class TorchStream:
    cuda_stream = 77


class CupyStream:
    ptr = 78


class CoreStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 79)


def test_streams() -> None:
    assert [stream_handle(s, 0) for s in (5, TorchStream(), CupyStream(), CoreStream())] == [
        5,
        77,
        78,
        79,
    ]
    assert stream_handle(None, 0) == 0
    with pytest.raises(ValueError, match=r"^stream: got str, need an integer handle"):
        stream_handle("main", 0)


def test_the_current_stream_is_that_of_a_loaded_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def current_stream(device: int) -> Any:
            assert device == 2
            return TorchStream()

    class Torch:
        cuda = Cuda

    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert stream_handle(None, 2) == 77
