"""The `mlakern` command."""

from __future__ import annotations

import sys

# Which extra of the package brings a module that a command misses.
_EXTRAS = {
    "click": "cli",
    "rich": "cli",
    "yaml": "cli",
    "numpy": "verify",
    "ml_dtypes": "verify",
    "cutlass": "build",
    "elftools": "build",
}


def main() -> None:
    """Run the command line; a missing optional package is reported with the extra that has it."""
    try:
        from mlakern.cli.app import app

        app(prog_name="mlakern")
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRAS:
            raise
        sys.stderr.write(
            f"mlakern: {module} is not installed; try pip install 'mlakern[{_EXTRAS[module]}]'\n"
        )
        sys.exit(3)
