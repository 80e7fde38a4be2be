"""mlakern show-config: what a bug report needs to say about an installation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import click

import mlakern
from mlakern.cli.common import emit_json, json_option, output, store_option
from mlakern.cli.kernels import listing
from mlakern.sources import source_digest
from mlakern.store import (
    CACHE_DIR_VARIABLE,
    CUBIN_DIR_VARIABLE,
    UNVERIFIED_VARIABLE,
    Store,
    open_store,
)

_PACKAGES = ("cuda-bindings", "nvidia-cutlass-dsl", "numpy", "ml_dtypes", "click", "rich")


@click.command("show-config")
@store_option
@json_option
def show_config(store_path: Path | None, as_json: bool) -> None:
    """Describe this installation: versions, where kernels are searched, devices.

    Nothing that is absent is an error here.
    """
    document = {
        "mlakern": mlakern.__version__,
        "place": str(Path(mlakern.__file__).parent),
        "kernel_sources": source_digest(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {
            name: os.environ.get(name)
            for name in (CUBIN_DIR_VARIABLE, CACHE_DIR_VARIABLE, UNVERIFIED_VARIABLE)
        },
        "search": _search(open_store(store_path)),
        "cuda": _cuda(),
    }
    if as_json:
        emit_json(document)
    else:
        output.print(_text(document), markup=False)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _search(store: Store) -> list[dict[str, Any]]:
    """The roots in order; the first that serves a kernel is the winner."""
    rows = listing(store)
    result: list[dict[str, Any]] = []
    won = False
    for root in store.roots:
        states = [row.state for row in rows if row.root == root]
        serves = states.count("serves")
        result.append(
            {
                "path": str(root.path),
                "origin": root.origin,
                "kernels": len(states),
                "serving": serves,
                "winner": bool(serves) and not won,
            }
        )
        won = won or bool(serves)
    return result


def _cuda() -> dict[str, Any]:
    """The driver and the devices, or why there are none."""
    from mlakern.runtime import driver

    try:
        version = driver.driver_version()
        devices = [
            {"arch": driver.architecture(i), "multiprocessors": driver.multiprocessors(i)}
            for i in range(driver.device_count())
        ]
    except driver.DriverError as error:
        return {"driver": None, "devices": [], "reason": str(error)}
    return {"driver": version, "devices": devices, "reason": None}


def _text(document: dict[str, Any]) -> str:
    lines = [
        f"mlakern {document['mlakern']} in {document['place']}",
        f"kernel sources {document['kernel_sources'][:16]}",
        f"Python {document['python']}, {document['platform']}",
        "packages",
        *(f"  {name} {version or '-'}" for name, version in document["packages"].items()),
        "environment",
        *(f"  {name} {value or '-'}" for name, value in document["environment"].items()),
        "kernels are searched in",
        *(
            f"  {root['path']} ({root['origin']}): {root['serving']} of {root['kernels']} serve"
            + (" <- wins" if root["winner"] else "")
            for root in document["search"]
        ),
    ]
    cuda = document["cuda"]
    if cuda["driver"] is None:
        lines.append(f"no CUDA: {cuda['reason']}")
    else:
        lines.append(f"CUDA driver {cuda['driver']}")
        lines += [
            f"  device {i}: {device['arch']}, {device['multiprocessors']} multiprocessors"
            for i, device in enumerate(cuda["devices"])
        ]
    return "\n".join(lines)
