"""Makes the manifest of a compiled configuration, and refuses code that does not match it."""

from __future__ import annotations

import hashlib

import mlakern
from mlakern import launch_rules, store
from mlakern.build.compiler import Compiled, KernelFacts
from mlakern.build.cubin_facts import CubinFacts, EntryFacts, read_cubin
from mlakern.build.key import BuildKey
from mlakern.build.ptx_facts import parameters, target
from mlakern.config import KernelConfig
from mlakern.limits import LIMITS
from mlakern.manifest import FileFacts, Kernel, Manifest, Provenance, arguments_of
from mlakern.runtime.tensor_maps import map_rules
from mlakern.signature import Parameter, offsets, signatures

# Cubins of toolkit 13 load in every driver of CUDA 13 (minor-version compatibility).
MIN_DRIVER = 13000


class BuildError(RuntimeError):
    """A compiled configuration that must not be published."""


def describe(
    config: KernelConfig, compiled: Compiled, key: BuildKey, *, allow_spills: bool = False
) -> Manifest:
    """The manifest; BuildError if cubin, PTX and signature disagree or registers spill."""
    facts = read_cubin(compiled.cubin)
    for what, arch in (("cubin", facts.arch), ("PTX", target(compiled.ptx))):
        if arch != config.arch:
            raise BuildError(f"{config.name}: {what} is for {arch}, need {config.arch}")
    return Manifest(
        config=config,
        kernels=tuple(
            _kernel(config, kernel, compiled.ptx, facts, allow_spills)
            for kernel in compiled.kernels
        ),
        derived=launch_rules.derived_rules(config),
        tensor_maps=map_rules(config),
        workspace=launch_rules.workspace_rule(config),
        limits=LIMITS,
        cubin=_file(store.CUBIN_NAME, compiled.cubin),
        ptx=_file(store.PTX_NAME, compiled.ptx.encode()),
        min_driver=MIN_DRIVER,
        provenance=Provenance(
            key=key.digest,
            package_version=mlakern.__version__,
            sources=key.sources,
            toolchain={**key.toolchain, "ptxas": facts.assembler},
            options=key.options,
        ),
    )


def _kernel(
    config: KernelConfig, kernel: KernelFacts, ptx: str, facts: CubinFacts, allow_spills: bool
) -> Kernel:
    signature = signatures(config)[kernel.role]
    if kernel.entry not in facts.entries:
        raise BuildError(f"cubin: no entry {kernel.entry}, need one of {sorted(facts.entries)}")
    entry = facts.entries[kernel.entry]
    _check_parameters(f"cubin: {kernel.entry}", entry.parameters, signature)
    _check_parameters(f"PTX: {kernel.entry}", parameters(ptx, kernel.entry), signature)
    _check_entry(kernel, entry, allow_spills)
    return Kernel(
        role=kernel.role,
        entry=kernel.entry,
        parameters=arguments_of(signature),
        when=launch_rules.launch_conditions(config)[kernel.role],
        grid=launch_rules.grid_rules(config)[kernel.role],
        block=kernel.block,
        cluster=kernel.cluster,
        dynamic_shared=kernel.dynamic_shared,
        static_shared=entry.static_shared,
        registers=entry.registers,
        barriers=entry.barriers,
        stack=entry.stack,
        spill_stores=entry.spill_stores,
        spill_loads=entry.spill_loads,
    )


def _check_parameters(
    where: str, slots: tuple[tuple[int, int], ...], signature: tuple[Parameter, ...]
) -> None:
    need = [(at, p.kind.size) for at, p in zip(offsets(signature), signature, strict=True)]
    for parameter, got, wanted in zip(signature, slots, need, strict=False):
        if got != wanted:
            raise BuildError(
                f"{where}: parameter {parameter.name}: got offset {got[0]}, size {got[1]}, "
                f"need offset {wanted[0]}, size {wanted[1]}"
            )
    if len(slots) != len(need):
        raise BuildError(f"{where}: got {len(slots)} parameters, need {len(need)}")


def _check_entry(kernel: KernelFacts, entry: EntryFacts, allow_spills: bool) -> None:
    if entry.block is not None and entry.block != kernel.block:
        raise BuildError(
            f"cubin: {kernel.entry}: requires blocks of {entry.block}, need {kernel.block}"
        )
    if (entry.spill_stores or entry.spill_loads) and not allow_spills:
        raise BuildError(
            f"cubin: {kernel.entry}: registers spill ({entry.spill_stores} bytes stored, "
            f"{entry.spill_loads} loaded in a thread), need none; lower the register use or list "
            "the configuration under allow_spills"
        )


def _file(name: str, content: bytes) -> FileFacts:
    return FileFacts(name, len(content), hashlib.sha256(content).hexdigest())
