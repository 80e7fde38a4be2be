"""The command group. A command's module is imported when the command is used, not before."""

from __future__ import annotations

import importlib
import sys

import click

from mlakern import __version__
from mlakern.cli.common import ExitCode, emit_error

# Command to (module, its name there, one line of help).
_COMMANDS = {
    "build": ("mlakern.cli.build", "build", "Compile configurations into a store."),
    "run": ("mlakern.cli.run", "run", "Launch kernels and compare them with the references."),
    "list": ("mlakern.cli.kernels", "list_kernels", "List the kernels that are present."),
    "show": ("mlakern.cli.kernels", "show", "Describe one kernel."),
    "verify": ("mlakern.cli.verify", "verify", "Check stored files; run every kernel and report."),
    "budgets": ("mlakern.cli.budgets", "budgets", "Compare kernels with their size budgets."),
    "prune": ("mlakern.cli.prune", "prune", "Remove what can serve no more."),
    "plan": ("mlakern.cli.plan", "plan", "Plan a decode step: splits, grids, workspace."),
    "show-config": ("mlakern.cli.show_config", "show_config", "Describe this installation."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name][:2]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlakern")
def app() -> None:
    """FP8 MLA decode kernels, compiled ahead of time.

    Exit status: 0 right, 1 wrong, 2 usage, 3 cannot be done here (and why), 130 interrupted.
    """


def run() -> int:
    """Run the command line and return its exit status.

    Whatever ends a command early is told on stderr and, with --json, in a document on stdout.
    """
    try:
        return app.main(prog_name="mlakern", standalone_mode=False) or ExitCode.OK
    except click.ClickException as error:
        error.show()
        return _report(ExitCode.USAGE, error.format_message())
    except click.Abort:
        click.echo("mlakern: interrupted", err=True)
        return _report(ExitCode.INTERRUPTED, "interrupted")


def _report(code: ExitCode, message: str) -> ExitCode:
    # The parser may not have got as far as the option.
    if "--json" in sys.argv:
        emit_error(code, message)
    return code
