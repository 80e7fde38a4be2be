"""The manifest: what a cubin is and how it is launched, as frozen dataclasses and as JSON.

A manifest lies beside each cubin and is enough to launch it from any language: parameter buffer,
tensor maps, grid rule, workspace and limits are all in it. It holds no time, path or host name, so
two builds of the same sources write the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from mlakern.config import ConfigError, KernelConfig
from mlakern.signature import Parameter, offsets

# Raised whenever a field is added, removed or changes its meaning.
SCHEMA = 2

Dim3 = tuple[int, int, int]


class ManifestError(ValueError):
    """A manifest that cannot be read; the message names the JSON path."""


class SchemaError(ManifestError):
    """A manifest that another version of the package wrote."""


@dataclass(frozen=True)
class Argument:
    """One kernel parameter: `size` bytes at byte `offset` of the parameter buffer."""

    name: str
    kind: str
    offset: int
    size: int
    meaning: str


@dataclass(frozen=True)
class Kernel:
    """One entry point of the cubin.

    when: the condition under which it is launched; grid: the extents. Both are expressions of
    argument names (see mlakern.launch_rules).
    block, cluster: threads in a block, blocks in a cluster.
    dynamic_shared, static_shared: bytes of shared memory in a block.
    registers: in a thread; barriers: named barriers in a block.
    stack, spill_stores, spill_loads: bytes in a thread.
    """

    role: str
    entry: str
    parameters: tuple[Argument, ...]
    when: str
    grid: tuple[str, str, str]
    block: Dim3
    cluster: Dim3
    dynamic_shared: int
    static_shared: int
    registers: int
    barriers: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class TensorMapRule:
    """How to encode the tensor map of one parameter; dimension 0 is the innermost one.

    source: the tensor whose bytes it covers; extents: elements; strides: bytes between neighbours
    in dimensions 1, 2, …; box: elements; swizzle: span in bytes, 0 for none. The entries are
    numbers or expressions of argument names; `note` states the choices a launcher has.
    """

    parameter: str
    source: str
    element_type: str
    extents: tuple[str, ...]
    strides: tuple[str, ...]
    box: tuple[str, ...]
    swizzle: int
    note: str


@dataclass(frozen=True)
class Region:
    """One array in the workspace: its shape and byte offset as expressions of argument names."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    offset: str


@dataclass(frozen=True)
class Workspace:
    """The caller's scratch buffer: total size in bytes (an expression) and its alignment."""

    regions: tuple[Region, ...]
    size: str
    alignment: int


@dataclass(frozen=True)
class FileFacts:
    """A file beside the manifest: size in bytes and SHA-256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """Which sources and tools made the cubin.

    key: digest of all that follows and of the configuration; sources: digest of the kernel sources;
    toolchain: tool to version.
    """

    key: str
    package_version: str
    sources: str
    toolchain: Mapping[str, str]
    options: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """Everything about one cubin. min_driver is a CUDA driver version such as 13000.

    kernels: in launch order. derived: arguments that follow from others, as expressions.
    limits: inclusive range of each bounded run-time value.
    """

    config: KernelConfig
    kernels: tuple[Kernel, ...]
    derived: Mapping[str, str]
    tensor_maps: tuple[TensorMapRule, ...]
    workspace: Workspace
    limits: Mapping[str, tuple[float, float]]
    cubin: FileFacts
    ptx: FileFacts
    min_driver: int
    provenance: Provenance

    def kernel(self, role: str) -> Kernel:
        """The kernel with this role; KeyError names the roles present."""
        for kernel in self.kernels:
            if kernel.role == role:
                return kernel
        roles = ", ".join(kernel.role for kernel in self.kernels)
        raise KeyError(f"manifest of {self.config.name}: no kernel {role!r}, need one of {roles}")

    def dumps(self) -> str:
        """JSON with sorted keys and a trailing newline; the same manifest gives the same text.

        `digest` is the SHA-256 of that text before the digest is added to it.
        """
        document = {"schema": SCHEMA, "name": self.config.name, **_encode(self)}
        return _json({**document, "digest": _digest(document)})


def arguments_of(signature: tuple[Parameter, ...]) -> tuple[Argument, ...]:
    """The parameters of a launch signature with their places in the parameter buffer."""
    return tuple(
        Argument(parameter.name, parameter.kind.label, at, parameter.kind.size, parameter.meaning)
        for parameter, at in zip(signature, offsets(signature), strict=True)
    )


def loads(text: str, *, verify: bool = True) -> Manifest:
    """The manifest in `text`.

    verify: compare the document with its digest, so that a damaged one is not believed.

    Raises SchemaError for another schema; ManifestError for damage, unknown, missing or odd fields.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"manifest: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ManifestError(f"manifest: got {type(document).__name__}, need an object")
    digest = document.pop("digest", None)
    if document.get("schema") != SCHEMA:
        raise SchemaError(
            f"manifest: schema is {document.get('schema')!r}, need {SCHEMA}; "
            "rebuild with this version of mlakern"
        )
    if verify and digest != _digest(document):
        raise ManifestError(f"manifest: digest is {digest!r}, its content gives another")
    del document["schema"]
    name = document.pop("name", None)
    manifest: Manifest = _decode(Manifest, document, "manifest")
    if name != manifest.config.name:
        raise ManifestError(f"manifest: name is {name!r}, its configuration {manifest.config.name}")
    return manifest


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(_json(document).encode()).hexdigest()


def _encode(value: Any) -> Any:
    if isinstance(value, KernelConfig):
        return value.as_dict()
    if is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    return value


T = TypeVar("T")


def _decode(kind: type[T], value: Any, where: str) -> Any:
    """`value` as `kind`, checked all the way down; `where` is its JSON path."""
    if kind is KernelConfig:
        try:
            return KernelConfig.from_dict(_typed(dict, value, where))
        except ConfigError as error:
            raise ManifestError(f"{where}: {error}") from None
    if is_dataclass(kind):
        return _decode_record(kind, _typed(dict, value, where), where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _decode_tuple(arguments, _typed(list, value, where), where)
    if origin is Mapping:
        items = _typed(dict, value, where).items()
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in items}
    if kind is float and type(value) is int:
        return value
    return _typed(kind, value, where)


def _decode_record(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = _hints(kind)
    unknown, missing = sorted(set(value) - set(hints)), sorted(set(hints) - set(value))
    if unknown or missing:
        raise ManifestError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    return kind(**{name: _decode(hints[name], value[name], f"{where}.{name}") for name in hints})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_tuple(arguments: tuple[Any, ...], value: list[Any], where: str) -> tuple[Any, ...]:
    kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
    if len(value) != len(kinds):
        raise ManifestError(f"{where}: got {len(value)} items, need {len(kinds)}")
    pairs = zip(kinds, value, strict=True)
    return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(pairs))


def _typed(kind: type[T], value: Any, where: str) -> T:
    # Exact types: JSON true is not the integer 1.
    if type(value) is not kind:
        raise ManifestError(f"{where}: got {value!r}, need {kind.__name__}")
    return value
