"""Converting values between forms inside a generated function, on demand and only once."""

from __future__ import annotations

import numpy as np

from mlakern.emulator import values
from mlakern.emulator.values import Value, dtype_of
from mlakern.emulator.writer import Writer

# How a form is made from the form a value was computed in. {0}: the source,
_SCALAR_STEPS = {
    ("i", "j"): "({0} ^ {sign}) - {sign}",
    ("j", "i"): "{0} & {mask}",
    ("i", "g"): "to_float32({0})",
    ("g", "i"): "from_float32({0})",
    ("i", "h"): "to_float64({0})",
    ("h", "i"): "from_float64({0})",
}


class Forms(Writer):
    """A writer that knows how a value is turned from one form into another."""

    def scalar(self, *sources: Value) -> bool:
        return all(source.scalar for source in sources)

    def get(self, value: Value, form: str) -> str:
        """The Python expression of a value in a form; array forms of scalars are 0-d."""
        name = value.names.get(form)
        if name is None:
            name = value.names[form] = self.convert(value, form)
        return name

    def convert(self, value: Value, form: str) -> str:
        if value.kind == "w":
            return self.convert_halves(value, form)
        if value.scalar:
            return self.convert_scalar(value, form)
        if form.isupper():
            return self.get(value, form.lower())
        if form in values.SCALAR_KINDS:
            return self.same(value, form)
        name = self.name(form)
        source = value.names.get(value.kind) or next(iter(value.names.values()))
        self.line(f"{name} = {source}.view({self.dtype(form, value.width)})")
        return name

    def convert_scalar(self, value: Value, form: str) -> str:
        if form in "us" or form in "US":
            return self.array_of(value, "i", "u", form)
        if form in "fF":
            return self.array_of(value, "i", "u", form)
        if form in "pP":
            return self.array_of(value, "b", "p", form)
        if value.kind != "i" and form != "i":
            source = Value(value.width, "i", {"i": self.get(value, "i")})
            return self.convert_scalar(source, form)
        rule = _SCALAR_STEPS.get((value.kind, form))
        if rule is None:
            raise self.error(f"a {value.kind} value has no form {form}")
        code = value.names[value.kind]
        if form == "j" and code.isdigit():
            bits = int(code)
            return str(bits - (1 << value.width) if bits >> (value.width - 1) else bits)
        if form in "gh" and code.isdigit():
            make = values.to_float32 if form == "g" else values.to_float64
            return self.constant(make(int(code)), "float", form, code)
        name = self.name(form)
        text = rule.format(code, sign=1 << (value.width - 1), mask=(1 << value.width) - 1)
        self.line(f"{name} = {text}")
        return name

    def array_of(self, value: Value, scalar_form: str, array_form: str, form: str) -> str:
        """A scalar as an array: 0-d, or one element for each lane for upper-case forms."""
        low = form.lower()
        if value.kind == "g" and low == "f":
            scalar_form = "g"
        code = self.get(value, scalar_form)
        if form.isupper():
            source = self.get(value, low)
            return self.temporary(f"full(g.width, {source})")
        if code.isdigit():
            zero_d = np.array(int(code), dtype_of(array_form, value.width))
            return self.constant(zero_d.view(dtype_of(low, value.width)), low, value.width, code)
        name = self.name(low)
        dtype = self.dtype("f" if scalar_form == "g" else array_form, value.width)
        view = (
            ""
            if scalar_form == "g" or low == array_form
            else f".view({self.dtype(low, value.width)})"
        )
        self.line(f"{name} = array({code}, {dtype}){view}")
        return name

    def same(self, value: Value, form: str) -> str:
        """The one value of all lanes of an operand that must not differ between them."""
        array = "p" if value.kind == "p" else "u"
        bits = Value(value.width, "b" if array == "p" else "i", {})
        bits.names[bits.kind] = self.temporary(f"uniform({self.get(value, array)})")
        return self.get(bits, form)

    def convert_halves(self, value: Value, form: str) -> str:
        assert value.halves is not None
        if form in values.SCALAR_KINDS:
            return self.same(value, form)
        low, high = (self.get(half, "U") for half in value.halves)
        name = self.name("u")
        self.line(f"{name} = join({low}, {high})")
        if form in "uU":
            return name
        value.names["u"] = name
        return self.temporary(f"{name}.view({self.dtype(form.lower(), 64)})")

    def dtype(self, form: str, width: int) -> str:
        return self.constant(dtype_of(form, width), "dtype", form, width)

    def split(self, value: Value) -> tuple[Value, Value]:
        """The low and high 32 bits of a 64-bit value."""
        if value.halves is None:
            if value.scalar:
                code = self.get(value, "i")
                low = Value(32, "i", {"i": self.temporary(f"{code} & 0xFFFFFFFF")})
                high = Value(32, "i", {"i": self.temporary(f"{code} >> 32")})
            else:
                code = self.get(value, "u")
                low = Value(32, "u", {"u": self.temporary(f"low_half({code})")})
                high = Value(32, "u", {"u": self.temporary(f"high_half({code})")})
            value.halves = low, high
        return value.halves
