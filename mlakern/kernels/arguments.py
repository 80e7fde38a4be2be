"""Kernel arguments in the order of the launch signature, as one object inside a kernel.

A device function takes an :class:`Arguments`; the DSL flattens it into one parameter for each
entry of the signature, so the list of :mod:`mlakern.signature` is the kernel's ABI and nothing
repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir import ir
from cutlass.experimental.cuda import TensorMap, create_tensor_map_tiled

from mlakern.signature import Kind, Parameter

_SCALARS: dict[Kind, type] = {
    Kind.INT32: cutlass.Int32,
    Kind.INT64: cutlass.Int64,
    Kind.FLOAT32: cutlass.Float32,
}


class Arguments:
    """Values of a signature's parameters as attributes: ``args.num_heads``, ``args.q_latent``.

    Tensor maps are TensorMap, pointers are cutlass.Pointer of the given element types, scalars are
    Int32, Int64 or Float32.
    """

    def __init__(self, signature: Sequence[Parameter], values: Sequence[Any]) -> None:
        self._signature = tuple(signature)
        self._values = tuple(values)
        self._by_name = dict(
            zip((parameter.name for parameter in signature), self._values, strict=True)
        )

    def __getattr__(self, name: str) -> Any:
        by_name: Mapping[str, Any] = self.__dict__.get("_by_name", {})
        if name not in by_name:
            raise AttributeError(f"no kernel parameter named {name!r}")
        return by_name[name]

    def __extract_mlir_values__(self) -> list[ir.Value]:
        return [_ir_value(value) for value in self._values]

    def __extract_mlir_attributes__(self) -> list[ir.DictAttr]:
        grid_constant = ir.DictAttr.get({"cuda.grid_constant": ir.UnitAttr.get()})
        plain = ir.DictAttr.get({})
        return [
            grid_constant if parameter.kind is Kind.TENSOR_MAP else plain
            for parameter in self._signature
        ]

    def __new_from_mlir_values__(self, values: list[ir.Value]) -> Arguments:
        rebuilt = [
            _from_ir_value(template, value)
            for template, value in zip(self._values, values, strict=True)
        ]
        return Arguments(self._signature, rebuilt)


def placeholders(signature: Sequence[Parameter], element_types: Mapping[str, type]) -> Arguments:
    """Arguments of the right types with no meaning, to trace a kernel for compilation.

    element_types: what each pointer parameter points to.
    """
    return Arguments(signature, [_placeholder(p, element_types) for p in signature])


def _placeholder(parameter: Parameter, element_types: Mapping[str, type]) -> Any:
    if parameter.kind is Kind.TENSOR_MAP:
        return create_tensor_map_tiled(
            cutlass.Int64(0), cutlass.Uint8, [16, 1], [cutlass.Int64(16)], [16, 1]
        )
    if parameter.kind is Kind.POINTER:
        element = element_types[parameter.name]
        null = cute.make_ptr(element, 0, cutlass.AddressSpace.gmem)
        return cutlass.Pointer(null, dtype=element)
    return _SCALARS[parameter.kind](0)


def _ir_value(value: Any) -> ir.Value:
    if isinstance(value, TensorMap):
        return value.value
    return value.ir_value() if hasattr(value, "ir_value") else value


def _from_ir_value(template: Any, value: ir.Value) -> Any:
    if isinstance(template, TensorMap):
        return TensorMap(value)
    if isinstance(template, cutlass.Pointer):
        return cutlass.Pointer(value, dtype=template.dtype)
    return type(template)(value)
