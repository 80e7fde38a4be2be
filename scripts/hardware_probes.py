"""Checks the emulator and the driver layer against a real GPU.

    python scripts/hardware_probes.py build DIR    compile the probes, emulate them (no GPU)
    python scripts/hardware_probes.py run DIR      run the same launches on the GPU and compare

`build` leaves cubins and, for each launch, its parameters, inputs and the emulator's outputs; `run`
needs numpy and cuda-bindings only. Probes: TMA boxes (swizzles, unaligned box rows, out of bounds),
approximate functions and conversions, the combine kernel and the work-list planner.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlakern.tensormap import Swizzle, TensorMap

ARCH = "sm_90a"
SHARED_BYTES = 16384
FLOATS = 1 << 16


@dataclass(frozen=True)
class Probe:
    """One launch.

    parameters: bytes, ("buffer", name, offset) or ("map", buffer, offset, TensorMap).
    expected: the emulator's outputs. ulps: units in the last place by which each may differ;
    absolute: or by this much, as float32 (logarithms near 1, PTX ISA "lg2").
    """

    name: str
    module: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int
    parameters: list[Any]
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    ulps: dict[str, int]
    absolute: dict[str, float] = field(default_factory=dict)


def main(command: str, directory: Path) -> int:
    if command == "build":
        return build(directory)
    return run(directory)


# --- building -----------------------------------------------------------------------------------


def build(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    modules = {}
    for name, host in probe_modules().items():
        ptx, cubin = compile_module(host)
        (directory / f"{name}.cubin").write_bytes(cubin)
        modules[name] = ptx
    probes = []
    for probe in (*box_probes(), *math_probes(), *combine_probes(), *planner_probes()):
        emulate(modules[probe.module], probe)
        probes.append(probe)
        print(f"emulated {probe.name}")
    (directory / "probes.pickle").write_bytes(pickle.dumps(probes))
    return 0


def compile_module(host: Any) -> tuple[str, bytes]:
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir

    from mlakern.build.compiler import assemble

    with tempfile.TemporaryDirectory() as workdir:
        options = (cute.GPUArch(ARCH), cute.KeepPTX(True), DumpDir(workdir))
        cute.compile[options](host, cute.runtime.make_fake_stream())
        ptx = next(Path(workdir).glob("*.ptx")).read_text()
        return ptx, assemble(ptx, ARCH, Path(workdir))


def probe_modules() -> dict[str, Any]:
    from probe_kernels import box_host, combine_host, math_host, planner_host

    modules = {f"boxes{rank}": box_host(rank) for rank in (3, 5)}
    modules["math"] = math_host()
    modules["planner"] = planner_host()
    for partial in ("float32", "float16"):
        for out in ("bfloat16", "float8_e4m3fn"):
            modules[f"combine_{partial}_{out}"] = combine_host(partial, out)
    return modules


def emulate(ptx: str, probe: Probe) -> None:
    from mlakern.emulator import GlobalMemory, Module

    memory = GlobalMemory()
    arrays = {**{n: a.copy() for n, a in probe.inputs.items()}, **probe.expected}
    addresses = {name: memory.add(name, array, writable=True) for name, array in arrays.items()}
    Module.from_ptx(ptx).launch(
        probe.entry,
        grid=probe.grid,
        block=probe.block,
        dynamic_shared=probe.dynamic_shared,
        parameters=resolve(probe.parameters, addresses),
        memory=memory,
    )


def resolve(parameters: list[Any], addresses: dict[str, int]) -> list[bytes | TensorMap]:
    result: list[bytes | TensorMap] = []
    for parameter in parameters:
        if isinstance(parameter, bytes):
            result.append(parameter)
        elif parameter[0] == "buffer":
            result.append((addresses[parameter[1]] + parameter[2]).to_bytes(8, "little"))
        else:
            _, name, offset, tensor_map = parameter
            result.append(replace(tensor_map, address=addresses[name] + offset))
    return result


def box_probes() -> Iterator[Probe]:
    rng = np.random.default_rng(7)
    source = rng.integers(0, 256, 1 << 16, dtype=np.uint8)
    cases = [
        # extents, strides, box, swizzle, coordinates, shared offset
        ((512, 64, 2), (576, 576 * 48), (128, 64, 1), Swizzle.B128, (128, 0, 1), 0),
        ((512, 64, 1), (576, 16), (128, 64, 1), Swizzle.B128, (384, 0, 0), 8192),
        ((512, 16, 4), (576, 9232), (128, 16, 1), Swizzle.B128, (0, 0, 3), 2048),
        ((512, 16, 4), (576, 9232), (128, 16, 1), Swizzle.B128, (0, 0, -1), 2048),
        ((512, 16, 4), (576, 9232), (128, 16, 1), Swizzle.B128, (256, 8, 1), 4096),
        ((64, 64, 1), (576, 16), (64, 64, 1), Swizzle.B64, (0, 0, 0), 1024),
        ((64, 32, 2), (576, 18448), (64, 32, 1), Swizzle.B64, (0, 16, 1), 2048),
        ((512, 6, 4), (512, 3072), (128, 2, 1), Swizzle.B128, (128, 4, 2), 256),
        ((512, 6, 4), (512, 3072), (128, 2, 1), Swizzle.B128, (128, 4, 2), 768),
        ((64, 6, 4), (512, 3072), (64, 2, 1), Swizzle.B64, (0, 2, 2), 128),
        ((64, 6, 4), (512, 3072), (64, 2, 1), Swizzle.B64, (0, 2, 3), 384),
        ((64, 6, 4), (512, 3072), (32, 4, 1), Swizzle.B32, (32, 2, 3), 384),
        ((512, 6, 4), (512, 3072), (64, 4, 2), Swizzle.NONE, (448, 4, 3), 128),
        ((512, 12, 1, 2, 3), (512, 16, 6144, 12288), (128, 64, 1, 1, 1), Swizzle.B128,
         (128, 0, 0, 1, 2), 0),
        ((512, 4, 3, 2, 2), (512, 2176, 6528, 13056), (128, 4, 1, 1, 1), Swizzle.B128,
         (0, 0, 2, 1, 1), 512),
        ((512, 4, 3, 2, 2), (512, 2176, 6528, 13056), (128, 4, 1, 1, 1), Swizzle.B128,
         (0, 0, 3, 1, 1), 512),
    ]  # fmt: skip
    for number, (extents, strides, box, swizzle, coordinates, offset) in enumerate(cases):
        tensor_map = TensorMap(1 << 20, 1, extents, strides, box, swizzle)
        rank = len(extents)
        numbers = (*coordinates, offset, tensor_map.box_bytes)
        yield Probe(
            name=f"box {number}: {extents} {box} {swizzle.name} at {coordinates} + {offset}",
            module=f"boxes{rank}",
            entry="probe_boxes_0",
            grid=(1, 1, 1),
            block=(32, 1, 1),
            dynamic_shared=SHARED_BYTES + 128,
            parameters=[
                ("map", "source", 0, tensor_map),
                ("buffer", "out", 0),
                *(int(n).to_bytes(4, "little", signed=True) for n in numbers),
            ],
            inputs={"source": source},
            expected={"out": np.zeros(SHARED_BYTES, np.uint8)},
            ulps={"out": 0},
        )


def math_probes() -> Iterator[Probe]:
    rng = np.random.default_rng(11)
    specials = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 448, 464, 465, -480, 1e-9, 2**-9, 2**-10, 3e38,
         -126, -127, -149, -150, 127.5, 128, 65504, 65520, 6e-8], np.float32)  # fmt: skip
    scales = np.exp2(rng.uniform(-14, 12, FLOATS)).astype(np.float32)
    values = (rng.standard_normal(FLOATS).astype(np.float32) * scales).astype(np.float32)
    values[: len(specials)] = specials
    # Halfway cases of e4m3, and their neighbours.
    codes = np.arange(0, 126, dtype=np.uint8)
    steps = _e4m3(codes)
    halves = (steps[:-1] + steps[1:]) / 2
    near = np.concatenate([halves, np.nextafter(halves, 0), np.nextafter(halves, 1e9), -halves])
    values[100 : 100 + len(near)] = near
    outs = {n: np.zeros(FLOATS, np.uint32) for n in ("ex2", "lg2", "rcp", "e4m3", "f16", "bf16")}
    yield Probe(
        name="approximate functions and conversions",
        module="math",
        entry="probe_math_0",
        grid=(FLOATS // 128, 1, 1),
        block=(128, 1, 1),
        dynamic_shared=0,
        parameters=[("buffer", "values", 0), *(("buffer", name, 0) for name in outs)],
        inputs={"values": values},
        expected=outs,
        ulps={"ex2": 2, "lg2": 2, "rcp": 1, "e4m3": 0, "f16": 0, "bf16": 0},
        absolute={"lg2": 2.0**-21},
    )


def _e4m3(codes: np.ndarray) -> np.ndarray:
    """Positive e4m3 codes as float32, from the format's definition."""
    exponent, mantissa = (codes >> 3).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.exp2(exponent - 7.0) * (1 + mantissa / 8)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(np.float32)


def combine_probes() -> Iterator[Probe]:
    import struct

    from mlakern.config import KernelConfig
    from mlakern.kernels.combine import Combine
    from mlakern.signature import combine_signature

    signature = combine_signature(KernelConfig())
    rng = np.random.default_rng(3)
    heads, tokens = 5, 2
    for partial, item in (("float32", np.float32), ("float16", np.float16)):
        for out, out_item in (("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)):
            for splits in (2, 7, 19, 40):
                lengths = np.array([0, 1, 130, 128 * 40 - 3], np.int32)
                # One query tile of all rows. Requests of one run or none are left alone.
                rows = tokens * heads
                partials = np.full((len(lengths), splits, rows, 512), np.nan, item)
                lses = np.full((len(lengths), splits, rows), np.nan, np.float32)
                for request, length in enumerate(lengths):
                    tiles = -(-int(length) // 128)
                    runs = -(-tiles // -(-tiles // splits)) if tiles else 0
                    partials[request, :runs] = rng.standard_normal((runs, rows, 512))
                    lses[request, :runs] = rng.normal(0, 6, (runs, rows))
                    # Some rows see nothing in the first run: what it left there is not looked at.
                    lses[request, :1, 1::4] = -np.inf
                    partials[request, :1, 1::4] = np.nan
                values = {
                    "batch": len(lengths), "num_heads": heads, "seq_len_q": tokens,
                    "query_tiles": 1, "tile_rows": rows, "splits": splits,
                    "out_stride_batch": tokens * heads * 512, "out_stride_token": heads * 512,
                    "out_stride_head": 512, "output_scale": 0.75, "lse_factor": 1.0,
                }  # fmt: skip
                formats = {"int32": "<i", "int64": "<q", "float32": "<f"}
                yield Probe(
                    name=f"combine {partial} -> {out}, {splits} splits",
                    module=f"combine_{partial}_{out}",
                    entry="probe_combine_0",
                    grid=(tokens * heads, len(lengths), 1),
                    block=Combine.block,
                    dynamic_shared=Combine.shared_bytes,
                    parameters=[
                        bytes(8)
                        if p.name == "block_split_kvs"
                        else ("buffer", p.name, 0)
                        if p.kind.label == "pointer"
                        else struct.pack(formats[p.kind.label], values[p.name])
                        for p in signature
                    ],
                    inputs={"seq_lens": lengths, "partial_out": partials, "partial_lse": lses},
                    expected={
                        # As the GPU run fills it: combine leaves unsplit rows alone.
                        "out": np.full(len(lengths) * rows * 512, np.iinfo(out_item).max, out_item),
                        "lse": np.full(len(lengths) * rows, np.nan, np.float32).view(np.uint32),
                    },
                    ulps={"out": 1, "lse": 2},
                    absolute={"lse": 2.0**-20},
                )


def planner_probes() -> Iterator[Probe]:
    """Random batches; the emulator's words are compared with the host planner's elsewhere."""
    from mlakern import work_list
    from mlakern.config import KernelConfig
    from mlakern.kernels.planner import Planner
    from mlakern.signature import planner_signature

    rng = np.random.default_rng(5)
    for number in range(40):
        batch = int(rng.integers(257, 600) if number % 8 == 0 else rng.integers(1, 65))
        query_tiles = int(rng.choice([1, 1, 2, 3]))
        clusters = int(rng.choice([1, 2, 7, 66, 74, 132, 255]))
        lengths = np.exp2(rng.uniform(0, 17, batch)).astype(np.int32)
        lengths[rng.random(batch) < 0.1] = 0
        values = {
            "batch": batch, "num_heads": 16, "seq_len_q": 1, "query_tiles": query_tiles,
            "tile_rows": 16, "clusters": clusters,
        }  # fmt: skip
        words = work_list.size_words(clusters, batch * query_tiles)
        yield Probe(
            name=f"planner: {batch} requests, {query_tiles} query tiles, {clusters} clusters",
            module="planner",
            entry="probe_planner_0",
            grid=(1, 1, 1),
            block=Planner.block,
            dynamic_shared=Planner.shared_bytes,
            parameters=[
                ("buffer", p.name, 0)
                if p.kind.label == "pointer"
                else int(values[p.name]).to_bytes(4, "little")
                for p in planner_signature(KernelConfig(schedule="work_list"))
            ],
            inputs={"seq_lens": lengths},
            expected={"work_list": np.full(words, np.iinfo(np.uint32).max, np.uint32)},
            ulps={"work_list": 0},
        )


# --- running ------------------------------------------------------------------------------------


def run(directory: Path) -> int:
    from mlakern.runtime import driver

    probes: list[Probe] = pickle.loads((directory / "probes.pickle").read_bytes())
    print(f"driver {driver.driver_version()}, {driver.architecture(0)}")
    with driver.device_context(0):
        failures = sum(compare(directory, probe) for probe in probes)
    print("PASS" if failures == 0 else f"FAIL: {failures} outputs differ")
    return 1 if failures else 0


def compare(directory: Path, probe: Probe) -> int:
    """Runs a probe on the GPU and prints each output's difference; how many are too large."""
    kernel = load(directory / f"{probe.module}.cubin").kernel(probe.entry)
    if probe.dynamic_shared:
        kernel.reserve_shared(probe.dynamic_shared)
    outputs = run_on_gpu(kernel, probe)
    failures = 0
    for name, expected in probe.expected.items():
        worst, count = difference(outputs[name], expected, probe.absolute.get(name, 0.0))
        good = worst <= probe.ulps[name]
        failures += not good
        verdict = "ok" if good else "DIFFERS"
        print(f"{verdict:8}{probe.name} {name}: {count} differ, by {worst} ulp at most")
    return failures


@cache
def load(cubin: Path) -> Any:
    from mlakern.runtime import driver

    return driver.Library(cubin.read_bytes())


def run_on_gpu(kernel: Any, probe: Probe) -> dict[str, np.ndarray]:
    from mlakern.runtime import driver

    initial = {n: np.full_like(a, np.iinfo(a.dtype).max) for n, a in probe.expected.items()}
    arrays = {**probe.inputs, **initial}
    addresses = {name: driver.allocate(array.nbytes) for name, array in arrays.items()}
    for name, array in arrays.items():
        driver.copy_to_device(addresses[name], array.ctypes.data, array.nbytes)
    kernel.prepare(launch_of(probe, resolve(probe.parameters, addresses)), stream=0).enqueue()
    driver.synchronize()
    outputs = {}
    for name in probe.expected:
        outputs[name] = np.empty_like(arrays[name])
        driver.copy_to_host(outputs[name].ctypes.data, addresses[name], outputs[name].nbytes)
    for address in addresses.values():
        driver.free(address)
    return outputs


def launch_of(probe: Probe, parameters: list[bytes | TensorMap]) -> Any:
    from mlakern.manifest import Kernel
    from mlakern.runtime.arguments import Launch

    kernel = Kernel(
        role="probe",
        entry=probe.entry,
        parameters=(),
        when="",
        grid=("", "", ""),
        block=probe.block,
        cluster=(1, 1, 1),
        dynamic_shared=probe.dynamic_shared,
        static_shared=0,
        registers=0,
        barriers=0,
        stack=0,
        spill_stores=0,
        spill_loads=0,
    )
    return Launch(kernel, probe.grid, tuple(parameters))


def difference(got: np.ndarray, expected: np.ndarray, absolute: float = 0.0) -> tuple[int, int]:
    """(largest difference in units in the last place, number of codes that differ).

    Any NaN equals any other; 32-bit codes within `absolute` of each other count as equal.
    """
    bits = got.dtype.itemsize * 8
    sign = 1 << (bits - 1)

    def ordered(codes: np.ndarray) -> np.ndarray:
        magnitude = (codes & (sign - 1)).astype(np.int64)
        return np.where(codes & sign, -magnitude, magnitude)

    distance = np.abs(ordered(got) - ordered(expected))
    if bits == 32:
        a, b = got.view(np.float32), expected.view(np.float32)
        with np.errstate(invalid="ignore"):
            distance[(np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= absolute)] = 0
    return int(distance.max()), int(np.count_nonzero(distance))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("build", "run"):
        print(__doc__)
        sys.exit(2)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
