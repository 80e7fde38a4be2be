"""Options that several commands share: the axes of a configuration, and lists of lengths."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from mlakern.config import AXES, ConfigError, KernelConfig

F = TypeVar("F", bound=Callable[..., Any])


def axis_options(function: F) -> F:
    """One option for each axis, all None by default; collect them with :func:`given_axes`."""
    for axis, values in reversed(tuple(AXES.items())):
        option = f"--{axis.replace('_', '-')}"
        if all(isinstance(value, bool) for value in values):
            off = f"--no-{axis.replace('_', '-')}"
            decorate = click.option(f"{option}/{off}", axis, default=None, help="Packed rows.")
        else:
            choices = "|".join(str(value) for value in values)
            kind = type(values[0])
            decorate = click.option(option, axis, type=kind, metavar="V", help=choices)
        function = decorate(function)
    return function


def given_axes(options: dict[str, Any]) -> dict[str, Any]:
    """Take the axes that were given out of a command's options; UsageError for an unknown value."""
    axes = {axis: options.pop(axis) for axis in AXES}
    given = {axis: value for axis, value in axes.items() if value is not None}
    for axis, value in given.items():
        if value not in AXES[axis]:
            known = ", ".join(map(str, AXES[axis]))
            raise click.UsageError(f"{axis}: got {value!r}, need one of {known}")
    return given


def config_from(config: KernelConfig | None, axes: dict[str, Any]) -> KernelConfig:
    """The configuration named, or the default one with these axes; UsageError otherwise."""
    if config is not None:
        if axes:
            raise click.UsageError(f"CONFIG excludes {', '.join(axes)}")
        return config
    try:
        return KernelConfig(**axes)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


class IntegerList(click.ParamType[tuple[int, ...]]):
    """Integers separated by commas."""

    name = "N,N,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        items = str(value).split(",")
        if not all(re.fullmatch(r" *-?[0-9]+ *", item) for item in items):
            self.fail(f"got {value!r}, need integers separated by commas", param, ctx)
        return tuple(int(item) for item in items)
