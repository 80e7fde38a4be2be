"""What the commands share: exit status, JSON output, the store option."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console

from mlakern.config import ConfigError, KernelConfig

F = TypeVar("F", bound=Callable[..., Any])

# Progress and messages; standard output is for results alone.
console = Console(stderr=True, soft_wrap=True, highlight=False)
# Into a pipe or a file rows stay whole.
output = Console(width=None if sys.stdout.isatty() else 200, highlight=False)


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    INTERRUPTED = 130  # as shells say of SIGINT


def json_option(function: F) -> F:
    """--json, as the argument as_json: the command prints exactly one JSON document."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(
        function
    )


def store_option(function: F) -> F:
    """--store DIR, as the argument store_path: searched before the other places."""
    return click.option(
        "--store",
        "store_path",
        type=click.Path(file_okay=False, path_type=Path),
        help="Search this folder of kernels first.",
    )(function)


def emit_json(document: Any) -> None:
    """Print a document; NaN and infinities, which JSON does not have, become null."""
    click.echo(json.dumps(_finite(document), indent=2, sort_keys=True, allow_nan=False))


def emit_error(code: ExitCode, message: str) -> None:
    """The document of a command that has no other to print."""
    emit_json({"status": code.name.lower(), "error": message})


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def stop(code: ExitCode, message: str) -> NoReturn:
    """End the command with this status; the message goes to stderr, or into the JSON document."""
    context = click.get_current_context()
    if context.params.get("as_json"):
        emit_error(code, message)
    click.echo(f"mlakern {context.info_name}: {message}", err=True)
    context.exit(int(code))


class ConfigName(click.ParamType[KernelConfig]):
    """A configuration by its canonical name."""

    name = "config"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> KernelConfig:
        if isinstance(value, KernelConfig):
            return value
        try:
            return KernelConfig.from_name(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
