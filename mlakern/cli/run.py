"""mlakern run: launch kernels on poisoned inputs and compare them with the references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mlakern.cli.axes import IntegerList, axis_options, config_from, given_axes
from mlakern.cli.common import (
    ConfigName,
    ExitCode,
    console,
    emit_json,
    json_option,
    output,
    stop,
    store_option,
)
from mlakern.cli.kernels import listing
from mlakern.config import KernelConfig
from mlakern.division import ceil_div
from mlakern.numerics import DEFAULT_RESCALE_THRESHOLD
from mlakern.runtime.arguments import Scalars
from mlakern.store import MissingKernelError, Store, StoreError, open_store
from mlakern.validation.backends import Backend, EmulatorBackend
from mlakern.validation.compare import Measured
from mlakern.validation.gpu import GpuBackend
from mlakern.validation.run import FAIL, PASS, UNAVAILABLE, Report, validate
from mlakern.validation.spec import LAYOUTS, MODEL_SCALE, VALUES, ProblemSpec

# Key tiles over all query tiles of a problem up to which the race detector is on by default.
_SMALL = 16
_COLUMNS = ("vs modelled", "vs exact", "worst row", "lse")
_COLUMN_OF = {
    "kernel_vs_modelled_out_bf16": "vs modelled",
    "kernel_vs_modelled_out_e4m3_beyond_one_step": "vs modelled",
    "kernel_vs_exact_out_bf16": "vs exact",
    "kernel_vs_exact_out_bf16_row": "worst row",
    "lse_vs_exact": "lse",
}


@click.command()
@click.argument("config", required=False, type=ConfigName())
@click.option("--all", "run_all", is_flag=True, help="Every kernel that the store serves.")
@axis_options
@click.option(
    "--backend",
    type=click.Choice(["auto", "gpu", "emulator"]),
    default="auto",
    show_default=True,
    help="auto: the GPU if a kernel is for it, else the emulator.",
)
@click.option("--heads", "num_heads", type=int, default=16, show_default=True)
@click.option("--seq-len-q", type=int, default=1, show_default=True, help="Query tokens.")
@click.option(
    "--seq-lens",
    type=IntegerList(),
    default="130,300",
    show_default=True,
    help="Keys of each request (mask dcp: of all ranks together).",
)
@click.option(
    "--window-left", type=int, default=128, show_default=True, help="Mask window: keys of history."
)
@click.option("--causal/--no-causal", default=True, show_default=True, help="Mask window.")
@click.option("--cp-world", type=int, default=1, show_default=True, help="Mask dcp: ranks.")
@click.option("--cp-rank", type=int, default=0, show_default=True, help="Mask dcp: this one.")
@click.option(
    "--cp-interleave", type=int, default=1, show_default=True, help="Mask dcp: keys in a row."
)
@click.option("--splits", type=int, help="KV runs of each request [the planner's].")
@click.option("--block-split-kvs", type=IntegerList(), help="KV runs, for each request.")
@click.option(
    "--host-work-list", is_flag=True, help="Schedule work_list: made on the host [the device]."
)
@click.option(
    "--multiprocessors",
    type=int,
    default=EmulatorBackend.multiprocessors,
    show_default=True,
    help="Emulator: what the planner sees.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--values", type=click.Choice(VALUES), default="random", show_default=True)
@click.option("--layout", type=click.Choice(list(LAYOUTS)), default="joined", show_default=True)
@click.option("--softmax-scale", type=float, default=MODEL_SCALE, help="[1/sqrt(192)]")
@click.option("--output-scale", type=float, default=1.0, show_default=True)
@click.option("--lse-base", type=click.Choice(["2", "e"]), default="2", show_default=True)
@click.option(
    "--rescale-threshold", type=float, default=DEFAULT_RESCALE_THRESHOLD, show_default=True
)
@click.option("--p-prescale-log2", type=float, default=0.0, show_default=True)
@click.option(
    "--races/--no-races", default=None, help="Race detector of the emulator [on if small]."
)
@click.option("--delay-seed", type=int, help="Emulator: delay and shuffle work by this seed.")
@store_option
@json_option
def run(
    config: KernelConfig | None,
    run_all: bool,
    backend: str,
    races: bool | None,
    delay_seed: int | None,
    multiprocessors: int,
    store_path: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Launch CONFIG on poisoned inputs and compare it with both references.

    Without CONFIG, axes name the configuration; with --all they select among those present.
    Exit status: 0 pass, 1 a wrong result, 2 usage, 3 cannot run here.
    """
    axes = given_axes(options)
    if config is None and not run_all and not axes:
        raise click.UsageError("need CONFIG, axes such as --page-size 64, or --all")
    if config is not None and run_all:
        raise click.UsageError("CONFIG excludes --all")
    store = open_store(store_path)
    spec = _spec(options)
    configs = _present(store, axes) if run_all else [config_from(config, axes)]
    if not configs:
        stop(ExitCode.UNAVAILABLE, f"no such kernel in {store.places}; try mlakern build")

    def backend_for(kernel: KernelConfig) -> Backend:
        gpu = GpuBackend()
        if backend == "gpu" or (backend == "auto" and gpu.unavailable_reason(kernel) is None):
            return gpu
        detect = _is_small(spec) if races is None else races
        return EmulatorBackend(detect, delay_seed, multiprocessors)

    reports = []
    for kernel in configs:
        with console.status(kernel.name):
            reports.append(_report(store, kernel, spec, backend_for))
    if as_json:
        emit_json(_document(reports, run_all))
    else:
        _print(reports)
    click.get_current_context().exit(_exit_code(reports))


def _spec(options: dict[str, Any]) -> ProblemSpec:
    scalars = Scalars(
        options.pop("softmax_scale"),
        options.pop("output_scale"),
        options.pop("lse_base"),
        options.pop("rescale_threshold"),
        options.pop("p_prescale_log2"),
    )
    return ProblemSpec(scalars=scalars, layout=LAYOUTS[options.pop("layout")], **options)


def _is_small(spec: ProblemSpec) -> bool:
    """Whether the race detector costs seconds at most."""
    rows = spec.num_heads * spec.seq_len_q
    tiles = sum(ceil_div(length, 128) for length in spec.seq_lens)
    return ceil_div(rows, 128) * tiles <= _SMALL


def _present(store: Store, axes: dict[str, Any]) -> list[KernelConfig]:
    rows = listing(store)
    for row in rows:
        if row.state == "damaged":
            console.print(f"passed over: {row.error}", markup=False)
    return [
        row.entry.manifest.config
        for row in rows
        if row.entry
        and row.state == "serves"
        and axes.items() <= row.entry.manifest.config.as_dict().items()
    ]


def _report(
    store: Store,
    config: KernelConfig,
    spec: ProblemSpec,
    backend_for: Callable[[KernelConfig], Backend],
) -> Report:
    backend = backend_for(config)
    try:
        entry = store.find(config)
        # The emulator runs the PTX: a damaged or missing cubin beside it must not pass.
        entry.verify()
        return validate(entry, spec, backend)
    except MissingKernelError as error:
        return Report(config, backend.name, spec, UNAVAILABLE, reason=str(error))
    except StoreError as error:
        return Report(config, backend.name, spec, FAIL, reason=str(error))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _exit_code(reports: Sequence[Report]) -> ExitCode:
    statuses = {report.status for report in reports}
    if FAIL in statuses:
        return ExitCode.FAILED
    return ExitCode.OK if statuses == {PASS} else ExitCode.UNAVAILABLE


def _document(reports: Sequence[Report], many: bool) -> dict[str, Any]:
    if not many:
        return reports[0].as_dict()
    status = {ExitCode.OK: PASS, ExitCode.FAILED: FAIL, ExitCode.UNAVAILABLE: UNAVAILABLE}
    return {
        "status": status[_exit_code(reports)],
        "results": [report.as_dict() for report in reports],
    }


def _print(reports: Sequence[Report]) -> None:
    table = Table("kernel", "backend")
    for name in (*_COLUMNS, "s"):
        table.add_column(name, justify="right")
    table.add_column("result")
    colours = {PASS: "green", FAIL: "red", UNAVAILABLE: "yellow"}
    for report in reports:
        cells = {_COLUMN_OF[m.name]: _cell(m) for m in report.errors if m.name in _COLUMN_OF}
        table.add_row(
            report.config.name,
            report.backend,
            *(cells.get(column, "") for column in _COLUMNS),
            f"{report.seconds:.2f}",
            f"[{colours[report.status]}]{report.status.upper()}",
        )
    output.print(table)
    for report in reports:
        if report.reason:
            output.print(f"{report.config.name}: {report.reason}", markup=False, soft_wrap=True)
    verdict = {ExitCode.OK: "PASS", ExitCode.FAILED: "FAIL", ExitCode.UNAVAILABLE: "UNAVAILABLE"}
    output.print(verdict[_exit_code(reports)], markup=False)


def _cell(measured: Measured) -> str:
    mark = "" if measured.passed else "!"
    return f"{mark}{measured.error:.1e} ≤ {measured.bound:.0e}"
