"""Manifests and store entries for tests that need some but no compiler."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

from mlakern.build.publish import StoreWriter
from mlakern.config import KernelConfig
from mlakern.manifest import (
    FileFacts,
    Kernel,
    Manifest,
    Provenance,
    Region,
    TensorMapRule,
    Workspace,
    arguments_of,
)
from mlakern.signature import signatures
from mlakern.sources import source_digest


def sample_manifest(config: KernelConfig | None = None) -> Manifest:
    """A complete manifest with made-up build results."""
    config = config or KernelConfig()
    return Manifest(
        config=config,
        kernels=tuple(sample_kernel(config, role) for role in signatures(config)),
        derived={"query_tiles": "seq_len_q // fold"},
        tensor_maps=(
            TensorMapRule(
                parameter="c_rope",
                source="c_rope",
                element_type="uint8",
                extents=("64", "page_size", "pages"),
                strides=("row stride", "page stride"),
                box=("64", "64", "1"),
                swizzle=64,
                note="",
            ),
        ),
        workspace=Workspace(
            regions=(
                Region("partial_out", "float32", ("B", "Sq", "H", "splits", "512"), "0"),
                Region("partial_lse", "float32", ("B", "Sq", "H", "splits"), "align(…, 256)"),
            ),
            size="align(end of partial_lse, 256)",
            alignment=256,
        ),
        limits={"num_heads": (1, 128), "rescale_threshold": (0.0, 8.807354922057604)},
        cubin=FileFacts("kernel.cubin", 4, "ab" * 32),
        ptx=FileFacts("kernel.ptx", 5, "cd" * 32),
        min_driver=13000,
        provenance=Provenance(
            key="ef" * 32,
            package_version="0.1.0",
            sources="01" * 32,
            toolchain={"nvidia-cutlass-dsl": "4.8.1", "ptxas": "V13.4.59"},
            options={"opt-level": "3"},
        ),
    )


def sample_kernel(config: KernelConfig, role: str) -> Kernel:
    return Kernel(
        role=role,
        entry=f"mla_{role}",
        parameters=arguments_of(signatures(config)[role]),
        when="splits > 1",
        grid=("2 * query_tiles", "splits", "B"),
        block=(384, 1, 1),
        cluster=(2, 1, 1),
        dynamic_shared=1000,
        static_shared=1024,
        registers=168,
        barriers=5,
        stack=0,
        spill_stores=0,
        spill_loads=0,
    )


def sample_cubin(version: int = 100, *, abi: int = 8, machine: int = 190) -> bytes:
    """An ELF header such as ptxas writes for this multiprocessor version, and some content."""
    ident = b"\x7fELF\x02\x01\x01\x41" + bytes([abi]) + bytes(7)
    flags = 0x6000002 | version << 8
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, machine, 1, 0, 0, 0, flags, *[0] * 6)
    return header + bytes(range(256))


def publish_sample(
    root: Path,
    config: KernelConfig | None = None,
    *,
    cubin: bytes | None = None,
    key: str = "0" * 64,
    sources: str | None = None,
) -> Path:
    """An entry in `root`, by default one that serves; returns its folder."""
    image = sample_cubin() if cubin is None else cubin
    ptx = f"// PTX of {key}\n"
    manifest = sample_manifest(config)
    manifest = replace(
        manifest,
        cubin=FileFacts("kernel.cubin", len(image), hashlib.sha256(image).hexdigest()),
        ptx=FileFacts("kernel.ptx", len(ptx), hashlib.sha256(ptx.encode()).hexdigest()),
        provenance=replace(manifest.provenance, key=key, sources=sources or source_digest()),
    )
    return StoreWriter(root).publish(manifest, image, ptx)
