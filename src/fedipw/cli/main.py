"""Commands and exit codes.

Commands are loaded by name when they are needed, and each imports what it needs, so that
``--help`` and a mistyped option answer at once and no command loads the lab for another.
"""

from __future__ import annotations

import errno
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from fedipw.cli.options import CommonOptions, OutputOptions, flat
from fedipw.errors import FedIPWError, InfeasibleError, PositivityError
from fedipw.numerics.checks import shown, visible

UNEXPECTED, BAD_INPUT, INFEASIBLE, UNREACHED = 1, 2, 3, 4

COMMANDS: Mapping[str, str] = {  # in the order of the help
    "example": "fedipw.cli.example:example",
    "reproduce": "fedipw.lab.commands:reproduce",
    "simulate": "fedipw.lab.commands:simulate",
    "calibrate": "fedipw.cli.calibrate:calibrate",
    "weights": "fedipw.cli.weights:weights",
    "evaluate": "fedipw.cli.evaluate:evaluate",
    "audit": "fedipw.cli.audit:audit",
    "new": "fedipw.cli.new:new",
    "study": "fedipw.lab.commands:study",
}
_FILES: Final = frozenset({"calibrate", "weights", "evaluate", "audit"})  # whose outputs are files
_HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_PACKAGES: Final = ("fedipw", "numpy", "polars")
_SMALLER = "Use a smaller table, fewer columns or levels, fewer --workers, or a larger machine."
_LONGEST = 4_000  # characters of a message
_REMEDIES = {
    errno.ENOSPC: "Free space on that disk, or write elsewhere.",
    errno.EDQUOT: "Free space under your quota, or write elsewhere.",
    errno.EFBIG: "Files may not grow that large there: raise the limit, or write elsewhere.",
    errno.EMFILE: "Too many files are open: raise the limit (ulimit -n).",
    errno.ENFILE: "The system has too many open files.",
    errno.EROFS: "Write elsewhere.",
    errno.EACCES: "Change its permissions, or write elsewhere.",
    errno.ENOMEM: _SMALLER,
}


# Contexts and commands have no type below: Typer takes them from click, or brings its own click.


class _Plain(TyperCommand):
    """A command whose help is plain text: in boxes, long words would be cut."""

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace("\\[", "[")  # Typer escapes what rich would read


class _OnDemand(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        groups = (OutputOptions, CommonOptions) if cmd_name in _FILES else (CommonOptions,)
        command = flat(getattr(import_module(module), function), *groups)
        alone.command(cmd_name, cls=_Plain, context_settings=_HELP)(command)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write what each command does, whole."""
        made = [(name, self.get_command(ctx, name)) for name in COMMANDS]
        with formatter.section("Commands"):
            formatter.write_dl([(n, c.get_short_help_str(limit=_LONGEST)) for n, c in made if c])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, COMMANDS)
            hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EOFError as error:  # Typer takes it for the end of what a person types
            raise _EndedEarlyError(error) from error


class _EndedEarlyError(Exception):
    """An ``EOFError`` on its way past Typer."""

    def __init__(self, error: EOFError) -> None:
        super().__init__(str(error))
        self.error = error


app = typer.Typer(
    cls=_OnDemand,
    name="fedipw",
    help="Federated learning that serves the target population.",
    no_args_is_help=True,
    context_settings=_HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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

    1 is a bug, whose traceback is written to a file; 2 is bad input, or what the system refused
    (a full disk, no memory); 3 targets that no weights on the enrolled clients can meet; 4 a
    probability below the threshold given with ``--strict``.
    """
    try:
        app(prog_name="fedipw")
    except FedIPWError as error:
        _end(str(error), _code(error))
    except MemoryError as error:
        _end(f"Memory ran out ({str(error) or 'no more can be had'}). {_SMALLER}", BAD_INPUT)
    except OSError as error:
        _end(_of_system(error), BAD_INPUT)
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also panics of polars, which are no Exception
        _end_unexpected(error.error if isinstance(error, _EndedEarlyError) else error)


def _end_unexpected(error: BaseException) -> NoReturn:
    if (damaged := _damaged_module(error)) is not None:
        _end(f"{damaged}: a compiled module is damaged ({error}). Remove it.", BAD_INPUT)
    if "start new thread" in str(error):
        _end(f"No thread can be started ({error}). {_SMALLER}", BAD_INPUT)
    try:
        message = _of_bug(error)
    except MemoryError:
        _end(f"Memory ran out. {_SMALLER}", BAD_INPUT)
    _end(message, UNEXPECTED)


def _code(error: FedIPWError) -> int:
    if isinstance(error, InfeasibleError):
        return INFEASIBLE
    return UNREACHED if isinstance(error, PositivityError) else BAD_INPUT


def _end(message: str, code: int) -> NoReturn:
    """Print a message as one block of lines, whatever characters it has, and leave."""
    whole = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
    lines = "\n".join(map(visible, f"error: {whole}".split("\n")))
    with suppress(OSError):  # nobody reads it
        typer.secho(lines, fg=typer.colors.RED, err=True)
    sys.exit(code)


def _of_system(error: OSError) -> str:
    """Return what the system refused, with the file it is about where that is known."""
    what = ": ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno is None and not what and "shared object" in reason:  # llvmlite's, without memory
        return f"A library cannot be loaded: {reason.split('. ')[0]}. {_SMALLER}"
    remedy = _REMEDIES.get(error.errno or 0, "Check that it is there and may be read or written.")
    return f"{what + ': ' if what else ''}{reason}. {remedy}"


def _damaged_module(error: BaseException) -> str | None:
    """Return the compiled module that Python could not load, as a full disk may leave one."""
    if "marshal data" not in str(error):
        return None
    frames = traceback.walk_tb(error.__traceback__)
    names = [frame.f_locals.get("bytecode_path") for frame, _ in frames]
    return next((str(name) for name in reversed(names) if name), None)


def _of_bug(error: BaseException) -> str:
    """Return one line on a failure that should not be, and write its traceback to a file."""
    kind = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    made = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    try:
        descriptor, path = tempfile.mkstemp(prefix="fedipw-", suffix="-traceback.txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{made}, Python {sys.version}\n{sys.argv}\n\n")
            file.write("".join(traceback.format_exception(error)))
        where = f"the traceback is in {path}"
    except OSError as full:
        where = f"its traceback could not be written ({full.strerror})"
    return (
        f"This is a bug of fedipw, please report it: {shown(kind)[1:-1]} ({made}, Python "
        f"{sys.version.split()[0]}); {where}."
    )
