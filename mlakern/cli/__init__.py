"""The `mlakern` command."""

from __future__ import annotations

import json
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
        from mlakern.cli.app import run

        sys.exit(run())
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRAS:
            raise
        message = f"{module} is not installed; try pip install 'mlakern[{_EXTRAS[module]}]'"
        if "--json" in sys.argv:
            print(json.dumps({"status": "unavailable", "error": message}))
        print(f"mlakern: {message}", file=sys.stderr)
        sys.exit(3)
