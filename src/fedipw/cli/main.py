"""Commands and exit codes.

Commands are loaded by name when they are needed, and each imports what it needs, so that
``--help`` and a mistyped option answer at once and no command loads the lab for another.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import click
import typer
from rich.console import Console
from typer.core import TyperGroup

from fedipw.cli.options import flat
from fedipw.errors import FedIPWError, InfeasibleError, PositivityError, WorkerLostError

UNEXPECTED, BAD_INPUT, INFEASIBLE, UNREACHED = 1, 2, 3, 4

COMMANDS: Mapping[str, str] = {  # in the order of the help
    "reproduce": "fedipw.lab.commands:reproduce",
    "simulate": "fedipw.lab.commands:simulate",
    "calibrate": "fedipw.cli.calibrate:calibrate",
    "weights": "fedipw.cli.weights:weights",
    "evaluate": "fedipw.cli.evaluate:evaluate",
    "audit": "fedipw.cli.audit:audit",
    "study": "fedipw.lab.commands:study",
}
_err = Console(stderr=True)


class _OnDemand(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        alone = typer.Typer(add_completion=False)
        alone.command(cmd_name)(flat(getattr(import_module(module), function)))
        return typer.main.get_command(alone)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, COMMANDS)
            hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_OnDemand,
    name="fedipw",
    help="Federated learning that serves the target population.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedipw {version('fedipw')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Federated learning that serves the target population."""
    del version


def main() -> None:
    """Run the command line; errors end in a message and an exit code, never a traceback.

    2 is bad input, 3 targets that no weights on the enrolled clients can meet, 4 a probability
    below the threshold given with ``--strict``.
    """
    try:
        app()
    except FedIPWError as error:
        _err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(_code(error))


def _code(error: FedIPWError) -> int:
    if isinstance(error, InfeasibleError):
        return INFEASIBLE
    if isinstance(error, WorkerLostError):
        return UNEXPECTED
    return UNREACHED if isinstance(error, PositivityError) else BAD_INPUT
