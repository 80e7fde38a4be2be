"""Try the runtime on a GPU that has no kernel of ours yet: python scripts/gpu_smoke.py

Compiles gpu_smoke.cu (a plain stand-in with the same launch signature) with nvcc for the GPU at
hand and drives it through the package: tensor maps, parameters, clusters, splits, layouts, torch
tensors and CUDA graphs. Needs nvcc, torch, numpy and ml_dtypes. The last line is PASS or FAIL.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from mlakern.config import KernelConfig
from mlakern.launch_rules import derived_rules, grid_rules, launch_conditions, workspace_rule
from mlakern.limits import LIMITS
from mlakern.manifest import FileFacts, Kernel, Manifest, Provenance, arguments_of
from mlakern.reference import Attention, exact
from mlakern.runtime import api, driver
from mlakern.runtime.arguments import Scalars
from mlakern.runtime.decode import load
from mlakern.runtime.tensor_maps import map_rules
from mlakern.signature import signatures
from mlakern.validation.gpu import GpuBackend
from mlakern.validation.run import validate
from mlakern.validation.spec import LAYOUTS, MODEL_SCALE, ProblemSpec

SOURCE = Path(__file__).with_suffix(".cu")
SHARED = 64 * 576 + 128 * 576 + 64 * 128 * 4 + 1024
COMBINE = (128, (1, 1, 1), 0)
SHAPES = {"attention": (256, (2, 1, 1), SHARED), "combine": COMBINE, "combine_bands2": COMBINE}


@dataclass(frozen=True)
class StandIn:
    """An entry of a store that holds only itself."""

    manifest: Manifest
    cubin: bytes

    def load_cubin(self, driver_version: int | None = None) -> bytes:
        assert driver_version is None or driver_version >= self.manifest.min_driver
        return self.cubin

    def load_ptx(self) -> str:
        raise NotImplementedError


class Store:
    """Compiles what is asked for."""

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._entries: dict[KernelConfig, StandIn] = {}

    def find(self, config: KernelConfig) -> StandIn:
        if config not in self._entries:
            self._entries[config] = StandIn(manifest_of(config), compiled(config, self._arch))
        return self._entries[config]


def compiled(config: KernelConfig, arch: str) -> bytes:
    macros = {
        "PAGE": config.page_size,
        "PACKED": int(config.pack_q),
        "CAUSAL": int(config.mask == "causal"),
    }
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.cubin"
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        command = ["nvcc", "-cubin", f"-arch={arch}", "-std=c++17", *defines, "-o", target, SOURCE]
        subprocess.run(command, check=True)
        return target.read_bytes()


def manifest_of(config: KernelConfig) -> Manifest:
    nothing = FileFacts("", 0, "")
    kernels = []
    for role, signature in signatures(config).items():
        block, cluster, shared = SHAPES[role]
        arguments = arguments_of(signature)
        kernels.append(
            Kernel(
                role,
                f"stand_in_{role}",
                arguments,
                launch_conditions(config)[role],
                grid_rules(config)[role],
                (block, 1, 1),
                cluster,
                shared,
                static_shared=0,
                registers=0,
                barriers=0,
                stack=0,
                spill_stores=0,
                spill_loads=0,
            )
        )
    return Manifest(
        config=config,
        kernels=tuple(kernels),
        derived=derived_rules(config),
        tensor_maps=map_rules(config),
        workspace=workspace_rule(config),
        limits=LIMITS,
        cubin=nothing,
        ptx=nothing,
        min_driver=12000,
        provenance=Provenance("", "", "", {}, {}),
    )


def problems() -> list[tuple[KernelConfig, ProblemSpec]]:
    """Shapes, layouts and page sizes that together use every path of the runtime."""
    base = KernelConfig()
    some = ProblemSpec(seq_lens=(130, 0, 300, 1), seq_len_q=2)
    cases = [
        (base, replace(some, num_heads=heads, layout=LAYOUTS[layout], splits=splits))
        for heads in (1, 6, 16, 96, 128)
        for layout in LAYOUTS
        for splits in (1, 3)
        if not (layout == "padded" and heads == 1)
    ]
    for page_size in (16, 32, 128):
        cases.append((base.with_axes(page_size=page_size), some))
    packed = base.with_axes(pack_q=True)
    cases.append((packed, replace(some, num_heads=96, seq_len_q=4, layout=LAYOUTS["separate"])))
    cases.append((packed, replace(some, num_heads=6, seq_len_q=3, values="ramp")))
    scalars = Scalars(MODEL_SCALE, 0.5, "e", rescale_threshold=2.0, p_prescale_log2=3.0)
    cases.append((base.with_axes(mask="plain"), replace(some, scalars=scalars, values="ramp")))
    cases.append((base, replace(some, seq_lens=(8192,), values="flat", splits=1)))
    wide = replace(LAYOUTS["joined"], page_padding=(1 << 29) + 16)
    cases.append((base, replace(some, seq_lens=(200,), layout=wide)))
    return cases


def run_problems(store: Store) -> bool:
    passed = True
    for config, spec in problems():
        report = validate(store.find(config), spec, GpuBackend())
        good = report.status == "pass"
        passed &= good
        shape = f"H{spec.num_heads} q{spec.seq_len_q} {spec.seq_lens} splits {spec.splits}"
        print(report.status, config.name, shape, spec.values, report.reason, flush=True)
    return passed


class Tensors:
    """A torch caller's tensors: 16 heads, two requests, pages of 64."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        fp8 = torch.float8_e4m3fn
        self.query = torch.randn(2, 1, 16, 576, device="cuda").to(fp8)
        self.cache = torch.randn(12, 1, 64, 576, device="cuda").to(fp8)
        self.tables = torch.randperm(12, device="cuda", dtype=torch.int32).reshape(2, 6)
        self.lengths = torch.tensor([384, 150], device="cuda", dtype=torch.int32)
        self.out = torch.full((2, 1, 16, 512), torch.nan, device="cuda", dtype=torch.bfloat16)
        self.lse = torch.full((2, 1, 16), torch.nan, device="cuda")
        self.workspace = torch.empty(8 << 20, device="cuda", dtype=torch.uint8)

    def error(self) -> float:
        """Relative L2 of out against the float64 definition, at the lengths as they are now."""
        rows = self.cache.float().cpu().numpy()[:, 0]
        keys = [
            rows[table].reshape(-1, 576)[:length]
            for table, length in zip(self.tables.tolist(), self.lengths.tolist(), strict=True)
        ]
        visible = np.array([[[0, len(k)]] for k in keys])
        want = exact(Attention(self.query.float().cpu().numpy(), keys, visible, MODEL_SCALE)).out
        got = self.out.float().cpu().numpy()
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def run_torch(store: Store) -> bool:
    t = Tensors()
    decode = load(store, KernelConfig())
    plan = decode.plan(batch=2, max_seq_len=384, num_heads=16)
    # A byte view stands for FP8 as well.
    query, cache = t.query, t.cache.view(torch.uint8)

    def call(**options: object) -> None:
        decode(
            query, cache, t.tables, t.lengths, plan=plan, out=t.out, lse=t.lse,
            workspace=t.workspace, softmax_scale=MODEL_SCALE, **options,
        )  # fmt: skip

    call()
    results = {"call": t.error() < 4e-2}
    t.out.fill_(torch.nan)
    call(enable_pdl=True)
    results["pdl"] = t.error() < 4e-2

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    t.lengths.copy_(torch.tensor([77, 0], dtype=torch.int32))
    t.out.fill_(torch.nan)
    graph.replay()
    results["replay after lengths changed"] = t.error() < 4e-2
    t.lengths.copy_(torch.tensor([384, 150], dtype=torch.int32))

    arguments = {
        "query": query, "kv_cache": cache, "workspace_buffer": t.workspace,
        "block_tables": t.tables, "seq_lens": t.lengths, "max_seq_len": 384,
        "softmax_scale": MODEL_SCALE,
    }  # fmt: skip
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            api.mla_decode(**arguments, out=t.out)
        results["first load under capture is refused"] = False
    except RuntimeError as error:
        results["first load under capture is refused"] = "preload" in str(error)
    api.preload([KernelConfig()], store=store)
    call()
    t.out, lse = api.mla_decode(**arguments, return_lse=True)
    results["mla_decode"] = t.error() < 4e-2 and bool((lse == t.lse).all())

    torch.cuda.synchronize()
    for name, timed in (("Decode", call), ("mla_decode", lambda: api.mla_decode(**arguments))):
        start = time.perf_counter()
        for _ in range(200):
            timed()
        print(f"{name}: {(time.perf_counter() - start) / 200 * 1e6:.1f} µs of host time a call")
        torch.cuda.synchronize()
    for name, good in results.items():
        print("pass" if good else "fail", name)
    return all(results.values())


def main() -> int:
    found = driver.architecture(0)
    print(f"{torch.cuda.get_device_name()}: {found}, driver {driver.driver_version()}")
    # The stand-in runs anywhere; configurations exist only for architectures with real kernels.
    driver.architecture = lambda _: KernelConfig().arch  # type: ignore[assignment]
    store = Store(found)
    passed = run_problems(store)
    passed &= run_torch(store)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
