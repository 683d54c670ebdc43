"""The command ``fedipw new``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from fedipw.cli.terminal import say


def new(
    directory: Annotated[Path, Argument(help="Directory of the app, which is not there yet.")],
) -> None:
    """Write a new Flower app whose model serves the whole population.

    Example: fedipw new my-app
    """
    from fedipw.cli.template import new_app

    made = new_app(directory)
    for path in made:
        say(str(path))
    say(f"Wrote {directory}. Its README.md says how to run it.")
