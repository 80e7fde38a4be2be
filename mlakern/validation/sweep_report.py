"""The report of a sweep: one line for each kernel, sorted, the same for the same findings."""

from __future__ import annotations

from collections.abc import Sequence

from mlakern import __version__
from mlakern.validation.compare import BOUNDS
from mlakern.validation.sweep import Finding

# Columns: heading to the names of bounds, for bf16 and for e4m3 output.
COLUMNS = {
    "modelled": (
        "kernel_vs_modelled_out_bf16",
        "kernel_vs_modelled_out_e4m3_beyond_one_step",
    ),
    "exact": ("kernel_vs_exact_out_bf16",),
    "worst row": ("kernel_vs_exact_out_bf16_row",),
    "LSE": ("lse_vs_exact",),
}

_HEAD = """\
# Verification report

mlakern {version}: {passed} of {count} kernels passed every problem on the emulator.

Each kernel was launched on the problems of its line, by the arguments that the runtime makes, with
NaN wherever nothing may be read. Errors are the largest of all problems, against the float64
definition ("exact") and a model of the same arithmetic ("modelled"), as a share of the bound. No
value may be NaN or infinite without reason, and no byte between rows of the output may change.

Bounds: {bounds}. B: requests, H: query heads, Sq: query tokens, K: keys of each request.

"""


def markdown(findings: Sequence[Finding]) -> str:
    """The report as Markdown."""
    passed = sum(finding.passed for finding in findings)
    bounds = ", ".join(
        f"{heading} {' or '.join(f'{BOUNDS[name]:g}' for name in names)}"
        for heading, names in COLUMNS.items()
    )
    lines = [_HEAD.format(version=__version__, passed=passed, count=len(findings), bounds=bounds)]
    lines.append(
        "| kernel | cubin SHA-256 | " + " | ".join(COLUMNS) + " | result | what was run |\n"
    )
    lines.append("| --- | --- |" + " ---: |" * len(COLUMNS) + " --- | --- |\n")
    lines += [_row(finding) for finding in sorted(findings, key=lambda finding: finding.name)]
    return "".join(lines)


def _row(finding: Finding) -> str:
    cells = [f"`{finding.name}`", finding.cubin_sha256[:12]]
    for names in COLUMNS.values():
        shares = [finding.worst[name] for name in names if name in finding.worst]
        cells.append(f"{shares[0]:.1%}" if shares else "")
    reason = f": {finding.reason}" if finding.reason else ""
    cells += [f"{finding.status.upper()}{reason}", finding.statement]
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |\n"


def _plain(text: str) -> str:
    """A cell is one line and has no border inside."""
    return " ".join(text.split()).replace("|", "\\|")
